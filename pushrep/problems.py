"""The problems of an outbox or a node, by the names that `pushrep status`, /readyz and the alerts use.

A problem that blocks means that records are not accepted, or were not shipped to Kafka for longer than a limit: then
/readyz answers 503. The other problems need an operator soon.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pushrep.log.disk_space import DiskLevel, DiskStatus
from pushrep.log.scrub import ScrubStatus

AWAY_LIMIT_S = 300.0
"""Nothing shipped for less than this is no problem yet: brokers may restart."""
CERTIFICATE_LEFT_S = 14 * 86_400
"""A certificate that expires within this time is a problem."""
STALLED_LIMIT_S = 60.0
"""A replay that is behind and receives nothing for less than this is no problem yet: its consumer may be busy."""

BLOCKS: Mapping[str, bool] = MappingProxyType(
    {
        "not_answering": True,  # a process has the directory or the port open, and does not answer
        "not_leading": True,  # records that have to reach replicas are refused
        "under_min_insync": True,  # partitions refuse Acks.ALL
        "disk_full": True,  # appends are refused
        "damaged": True,  # a log lost records that were on disk; its partition refuses appends
        "log_offline": True,  # a node's log: its disk failed
        "kafka_away": True,  # nothing could be shipped for longer than the limit
        "shipping_stopped": False,  # of partitions, for example because the topic refuses a record
        "log_waits": False,  # a node's log waits for an operator
        "segment_damaged": False,  # found by the scrub, not repaired from another member yet
        "replica_away": False,  # no session with a member can begin, or its log is damaged
        "replay_stalled": False,  # a replay is behind, receives nothing, and holds back segments
        "disk_filling": False,  # leases are broken and retention runs at once
        "certificate_expires": False,  # within two weeks, or has expired
    }
)
"""Every problem, worst first, and whether it blocks."""


class Problem(NamedTuple):
    """One problem: its name in BLOCKS, and a text for people that says where and why."""

    problem: str
    why: str

    @property
    def blocks(self) -> bool:
        """Whether /readyz answers 503 for it."""
        return BLOCKS[self.problem]

    def as_dict(self) -> dict[str, object]:
        """The problem as a JSON object."""
        return {**self._asdict(), "blocks": self.blocks}


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, in the order of BLOCKS."""
    order = list(BLOCKS)
    return sorted(problems, key=lambda one: order.index(one.problem))


def disk_problems(disk: DiskStatus) -> Iterator[Problem]:
    """The problem of this disk, by the limits of the logs on it."""
    used = f"{disk.used_bytes} of {disk.size_bytes} bytes of {disk.mount} are used"
    if disk.level >= DiskLevel.FULL:
        yield Problem("disk_full", f"{used}: appends are refused")
    elif disk.level >= DiskLevel.PRESSED:
        yield Problem("disk_filling", used)


def scrub_problems(scrub: ScrubStatus) -> Iterator[Problem]:
    """A problem for each damaged segment."""
    for one in scrub.findings:
        yield Problem("segment_damaged", f"{one.log}/{one.segment} from offset {one.offset} on: {one.reason}")


def certificate_problems(certificates: Mapping[str, int | None], now_s: float) -> Iterator[Problem]:
    """A problem for each certificate that expires soon. certificates: when each expires (Unix time; None: unknown), by
    its use ("replicas", "kafka", "health", "node").
    """
    for use, expires_s in certificates.items():
        if expires_s is not None and expires_s - now_s < CERTIFICATE_LEFT_S:
            left_h = (expires_s - now_s) / 3600
            why = f"expires in {left_h:.0f} hours" if left_h > 0 else "has expired"
            yield Problem("certificate_expires", f"the certificate for {use}, or its CA's, {why}")
