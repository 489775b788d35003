"""The problems, by the names that `pushrep status`, /readyz, the alerts and the console use."""

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

CERTIFICATE_LEFT_S = 14 * 86_400
"""A certificate that expires within this time is a problem."""


class Blocks(Enum):
    """What does not work while a problem lasts."""

    APPENDS = "appends"
    """Records are refused. /readyz answers 503."""
    ACKNOWLEDGEMENTS = "acknowledgements"
    SHIPPING = "shipping"
    """Records do not reach Kafka."""
    REPLICATION = "replication"
    """A copy falls behind."""
    NOTHING = "nothing"
    """An operator is needed soon."""


class ProblemKind(NamedTuple):
    """A kind of problem. command: the next one for an operator; `{at}` is the directory or address."""

    blocks: Blocks
    advice: str
    command: str


PROBLEMS: Mapping[str, ProblemKind] = MappingProxyType(
    {
        # a process has the directory or the port open, and does not answer
        "not_answering": ProblemKind(
            Blocks.APPENDS,
            "Check whether this is the right place, and whether its process hangs.",
            "pushrep status {at}",
        ),
        # records that have to reach replicas are refused
        "not_leading": ProblemKind(
            Blocks.APPENDS,
            "Start the nodes that are down, or open the outbox again.",
            "pushrep status {at} --partitions",
        ),
        # partitions refuse Acks.ALL
        "under_min_insync": ProblemKind(
            Blocks.APPENDS, "Start a missing member, or replace a lost one.", "pushrep status {at} --partitions"
        ),
        "disk_full": ProblemKind(
            Blocks.APPENDS, "Free space on the disk: appends then continue by themselves.", "pushrep log ls {at}"
        ),
        # a log lost records that were on disk; its partition refuses appends
        "damaged": ProblemKind(
            Blocks.APPENDS, "Find out what is damaged before you change anything.", "pushrep log verify {at}"
        ),
        # a node's log whose disk failed
        "log_offline": ProblemKind(
            Blocks.REPLICATION,
            "Check the node's log lines and its disk; then restart the node.",
            "pushrep log verify {at}",
        ),
        # nothing could be shipped for longer than the limit
        "kafka_away": ProblemKind(
            Blocks.SHIPPING,
            "Check whether the brokers answer; records wait in the outbox.",
            "pushrep status {at}",
        ),
        # of a partition, for example because the topic refuses a record
        "shipping_stopped": ProblemKind(
            Blocks.SHIPPING, "Let the topic accept the record, or skip it.", "pushrep outbox skip --help"
        ),
        # a node's log that an operator has to decide about
        "log_waits": ProblemKind(
            Blocks.REPLICATION, "The node's log lines have the reason.", "pushrep log verify {at}"
        ),
        # found by the scrub, not repaired from another member yet
        "segment_damaged": ProblemKind(
            Blocks.NOTHING,
            "A member that answers repairs it. Without one, list the damaged offsets.",
            "pushrep log verify {at}",
        ),
        # no session with a member can begin, or its log is damaged
        "replica_away": ProblemKind(
            Blocks.REPLICATION,
            "Check the node's log lines, and whether its address answers.",
            "pushrep status {at}",
        ),
        # a replay that is behind, receives nothing, and holds back segments
        "replay_stalled": ProblemKind(
            Blocks.NOTHING, "Restart its consumer, or end the session.", "pushrep replica stop-session {at} SESSION"
        ),
        # leases are broken and retention runs at once
        "disk_filling": ProblemKind(
            Blocks.NOTHING, "Free space on the disk, or shorten retention.", "pushrep log ls {at}"
        ),
        # within two weeks, or it has expired
        "certificate_expires": ProblemKind(
            Blocks.NOTHING, "Replace the certificate; a service reads it when it starts.", "pushrep status {at}"
        ),
    }
)
"""Every kind of problem, worst first."""
_ORDER = {name: number for number, name in enumerate(PROBLEMS)}


class Problem(NamedTuple):
    """One problem.

    name: in PROBLEMS. subject: what has it, for example `partition 3` or `topic orders`. why: a sentence. since_ms:
    Unix time, None: unknown. blocks: None: as in PROBLEMS.
    """

    name: str
    subject: str
    why: str
    since_ms: int | None = None
    blocks: Blocks | None = None

    @property
    def blocked(self) -> Blocks:
        """What does not work."""
        return self.blocks or PROBLEMS[self.name].blocks

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among others, the worst first."""
        return self.blocked is not Blocks.APPENDS, _ORDER[self.name]

    def as_dict(self, at: str) -> dict[str, Any]:
        """The problem as a JSON object. at: the place, for its command."""
        kind = PROBLEMS[self.name]
        return {
            "problem": self.name,
            "subject": self.subject,
            "why": self.why,
            "since_ms": self.since_ms,
            "blocks": self.blocked.value,
            "advice": kind.advice,
            "command": kind.command.format(at=at),
        }


def certificate_problems(certificates: Mapping[str, int | None], now_s: float) -> Iterator[Problem]:
    """A problem for each certificate that expires soon. certificates: when each expires (Unix time; None: unknown), by
    its use ("replicas", "kafka", "health", "node").
    """
    for use, expires_s in certificates.items():
        if expires_s is not None and expires_s - now_s < CERTIFICATE_LEFT_S:
            left_h = (expires_s - now_s) / 3600
            why = f"it, or its CA's, expires in {left_h:.0f} hours" if left_h > 0 else "it, or its CA's, has expired"
            since_ms = 1000 * (expires_s - CERTIFICATE_LEFT_S)
            yield Problem("certificate_expires", f"certificate for {use}", why, since_ms)
