"""What is wrong with an outbox or a node, in the words that `pushrep status`, /readyz and the alerts share.

A problem that `blocks` keeps records from being taken, or from reaching Kafka for long: /readyz answers 503. The others
want an operator, soon.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pushrep.log.disk_space import DiskLevel, DiskStatus
from pushrep.log.scrub import ScrubStatus

AWAY_LIMIT_S = 300.0
"""A Kafka that is away for less is a pause."""
CERTIFICATE_LEFT_S = 14 * 86_400
STALLED_LIMIT_S = 60.0
"""A replay that is behind and takes nothing for less may have a consumer that is busy."""

BLOCKS: Mapping[str, bool] = MappingProxyType(
    {
        "not_answering": True,  # a process has the directory, or the port, and does not answer
        "not_leading": True,  # what has to reach replicas is refused
        "under_min_insync": True,  # partitions refuse Acks.ALL
        "disk_full": True,  # appends are refused
        "damaged": True,  # a log lost records that were on disk; its partition refuses appends
        "log_offline": True,  # a node's log: its disk failed
        "kafka_away": True,  # nothing is shipped, for longer than the limit
        "shipping_stopped": False,  # partitions wait for an operator: a record that the topic refuses, say
        "log_waits": False,  # a node's log waits for an operator
        "segment_damaged": False,  # the scrub found it; no other member's batches have repaired it yet
        "replica_away": False,  # no session with a member can begin, or what it holds is damaged
        "replay_stalled": False,  # it is behind, takes nothing, and holds segments back
        "disk_filling": False,  # leases are broken and retention runs at once
        "certificate_expires": False,  # within two weeks, or it has
    }
)
"""Every problem, worst first, and whether it blocks."""


class Problem(NamedTuple):
    """One thing that is wrong: a word of BLOCKS, and what it is about, for people."""

    problem: str
    why: str

    @property
    def blocks(self) -> bool:
        """See the file's map."""
        return BLOCKS[self.problem]

    def as_dict(self) -> dict[str, object]:
        """As values of JSON."""
        return {**self._asdict(), "blocks": self.blocks}


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    """In the order of BLOCKS."""
    order = list(BLOCKS)
    return sorted(problems, key=lambda one: order.index(one.problem))


def disk_problems(disk: DiskStatus) -> Iterator[Problem]:
    """By the limits of the logs on it."""
    used = f"{disk.used_bytes} of {disk.size_bytes} bytes of {disk.mount} are used"
    if disk.level >= DiskLevel.FULL:
        yield Problem("disk_full", f"{used}: appends are refused")
    elif disk.level >= DiskLevel.PRESSED:
        yield Problem("disk_filling", used)


def scrub_problems(scrub: ScrubStatus) -> Iterator[Problem]:
    """Each damaged segment."""
    for one in scrub.findings:
        yield Problem("segment_damaged", f"{one.log}/{one.segment} from offset {one.offset} on: {one.reason}")


def certificate_problems(certificates: Mapping[str, int | None], now_s: float) -> Iterator[Problem]:
    """certificates: by what each is for ("replicas", "kafka", "health", "node"), when it expires. Unix time."""
    for use, expires_s in certificates.items():
        if expires_s is not None and expires_s - now_s < CERTIFICATE_LEFT_S:
            left_h = (expires_s - now_s) / 3600
            why = f"expires in {left_h:.0f} hours" if left_h > 0 else "has expired"
            yield Problem("certificate_expires", f"the certificate for {use}, or its CA's, {why}")
