"""The problems, by the names that `pushrep status`, /readyz, the alerts and the console use."""

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypedDict

CERTIFICATE_LEFT_S = 14 * 86_400
"""A certificate that expires within this time is a problem."""


class Blocks(Enum):
    """What does not work while a problem lasts."""

    APPENDS = "appends"
    """Records are refused."""
    ACKNOWLEDGEMENTS = "acknowledgements"
    """Records are taken, and their receipts wait."""
    SHIPPING = "shipping"
    """Records do not reach Kafka."""
    REPLICATION = "replication"
    """A copy falls behind."""
    NOTHING = "nothing"
    """An operator is needed soon."""


class ShownProblem(TypedDict):
    """A problem as a JSON object. command: for the place where it is."""

    problem: str
    subject: str
    why: str
    since_ms: int | None
    blocks: str
    advice: str
    command: str


class ProblemKind(NamedTuple):
    """A kind of problem. command: the next one for an operator; `{at}` is the directory or address."""

    blocks: Blocks
    means: str
    advice: str
    command: str


PROBLEMS: Mapping[str, ProblemKind] = MappingProxyType(
    {
        "not_answering": ProblemKind(
            Blocks.APPENDS,
            "A process has the directory or the port open and does not answer, or the place can't be read.",
            "Check whether this is the right place, and whether its process hangs.",
            "pushrep status {at}",
        ),
        "not_leading": ProblemKind(
            Blocks.APPENDS,
            "The outbox does not lead: records that have to reach replicas are refused.",
            "Start the nodes that are down, or open the outbox again.",
            "pushrep status {at} --partitions",
        ),
        "under_min_insync": ProblemKind(
            Blocks.APPENDS,
            "Partitions have fewer than `min_insync_replicas` in-sync members, and refuse `Acks.ALL`.",
            "Start a missing member, or replace a lost one.",
            "pushrep status {at} --partitions",
        ),
        "disk_full": ProblemKind(
            Blocks.APPENDS,
            "The disk is above `disk_full_percent`: appends are refused.",
            "Free space on the disk: appends then continue by themselves.",
            "pushrep log ls {at}{argument}",
        ),
        "log_stopped": ProblemKind(
            Blocks.APPENDS,
            "A partition's log refused its last append. The others go on.",
            "Mend what the reason names. The log is tried again by itself, a minute after at the latest.",
            "pushrep status {at} --partitions",
        ),
        "damaged": ProblemKind(
            Blocks.APPENDS,
            "A log lost records that were on disk: its partition takes no appends, the rest can be read.",
            "Find out what is damaged before you change anything.",
            "pushrep log verify {at}{argument}",
        ),
        "not_acknowledged": ProblemKind(
            Blocks.ACKNOWLEDGEMENTS,
            "Records are in the log, and their receipts have waited for more than five seconds.",
            "Look which member or disk does not answer.",
            "pushrep status {at} --partitions",
        ),
        "log_offline": ProblemKind(
            Blocks.REPLICATION,
            "The disk of a node's log failed, or refused the last write. The leader goes on without it.",
            "Check the node's log lines and its disk; then restart the node.",
            "pushrep log verify {at}{argument}",
        ),
        "kafka_away": ProblemKind(
            Blocks.SHIPPING,
            "Nothing could be shipped, or not to a partition or broker, for more than five seconds. Records wait.",
            "Check whether the brokers answer, and whether each partition has a leader.",
            "pushrep status {at}",
        ),
        "fence_waits": ProblemKind(
            Blocks.SHIPPING,
            "Partitions wait until other instances of the outbox are shut out of them: a transaction is still open.",
            'It ends by itself; KafkaDestination(fence="off") does not wait, if no other instance runs.',
            "pushrep status {at}",
        ),
        "shipping_stopped": ProblemKind(
            Blocks.SHIPPING,
            "A partition is not shipped, for example because the topic refuses a record.",
            "Let the topic accept the record, or skip it.",
            "pushrep outbox skip {argument} --directory {at} --reason WHY",
        ),
        "slot_waits": ProblemKind(
            Blocks.SHIPPING,
            "No worker has a slot open, and records of it are not shipped.",
            "Start a worker that ships to the topic: it ships free slots, too. Or ship it by the command.",
            "pushrep ship {at} --bootstrap-servers HOST:9092",
        ),
        "table_stopped": ProblemKind(
            Blocks.SHIPPING,
            "The relay of a database's rows has stopped: it would lose rows, repeat them, or take another one's.",
            "Do what the reason says, then start the relay again.",
            "pushrep tables status DSN --topic {argument}",
        ),
        "table_waits": ProblemKind(
            Blocks.SHIPPING,
            "The relay of a database's rows has got no further for more than five seconds. Rows wait in their table.",
            "Check whether the database answers, and the other problems of this outbox.",
            "pushrep tables status DSN --topic {argument}",
        ),
        "rows_parked": ProblemKind(
            Blocks.NOTHING,
            "The outbox refused rows of a database, and the relay went on without them.",
            "Correct what refuses them and retry them, or drop them.",
            "pushrep tables status DSN --topic {argument}",
        ),
        "vacuum_held": ProblemKind(
            Blocks.NOTHING,
            "A session, prepared transaction or slot keeps deleted rows from vacuum: the relay has to step over them.",
            "End it in the database: commit, roll back, or drop the slot.",
            "pushrep tables status DSN --topic {argument}",
        ),
        "records_parked": ProblemKind(
            Blocks.NOTHING,
            "A topic refused records, and their partitions went on without them.",
            "Send each again, or say that it is done.",
            "pushrep outbox parked list --directory {at}",
        ),
        "log_waits": ProblemKind(
            Blocks.REPLICATION,
            "A node's log and its leader's hold different records, or its leader has no more what it needs.",
            "The node's log lines have the reason.",
            "pushrep log verify {at}{argument}",
        ),
        "segment_damaged": ProblemKind(
            Blocks.NOTHING,
            "The scrub found a sealed segment damaged, and no member has repaired it yet.",
            "A member that answers repairs it. Without one, list the damaged offsets.",
            "pushrep log verify {at}{argument}",
        ),
        "directory_moved": ProblemKind(
            Blocks.NOTHING,
            "A process's directory was moved or replaced: it goes on in its own files, not in those at the path now.",
            "Stop that process, and decide which of the directories goes on. Never merge their files.",
            "pushrep status {at}",
        ),
        "replica_away": ProblemKind(
            Blocks.REPLICATION,
            "No session with a member can begin, its log is damaged, or its joining was left. The others go on.",
            "Check the node's log lines, and whether its address answers.",
            "pushrep status {at}",
        ),
        "replay_stalled": ProblemKind(
            Blocks.NOTHING,
            "A replay is behind and has received nothing for a minute. It holds segments back.",
            "Restart its consumer, or end the session.",
            "pushrep replica stop-session {at} {argument}",
        ),
        "disk_filling": ProblemKind(
            Blocks.NOTHING,
            "The disk is above `disk_pressed_percent`: leases are broken, and retention runs at once.",
            "Free space on the disk, or shorten retention.",
            "pushrep log ls {at}{argument}",
        ),
        "retention_held": ProblemKind(
            Blocks.NOTHING,
            "Old records are not removed by time for a day at most: the wall clock may be wrong. Size limits go on.",
            "Check the machine's clock. Removal goes on by itself, also by a clock that is right now.",
            "pushrep log ls {at}{argument}",
        ),
        "certificate_expires": ProblemKind(
            Blocks.NOTHING,
            "A certificate, or its CA's, expires within two weeks, or has.",
            "Replace the certificate; a service reads it when it starts.",
            "pushrep status {at}",
        ),
    }
)
"""Every kind of problem, worst first."""
_ORDER = {name: number for number, name in enumerate(PROBLEMS)}


class Problem(NamedTuple):
    """One problem.

    name: in PROBLEMS. subject: what has it, for example `partition 3` or `topic orders`. why: a sentence. since_ms:
    Unix time, None: unknown. blocks: None: as in PROBLEMS. argument: for its command. command: another one than in
    PROBLEMS, which may name `{at}`.
    """

    name: str
    subject: str
    why: str
    since_ms: int | None = None
    blocks: Blocks | None = None
    argument: str = ""
    command: str = ""

    @property
    def blocked(self) -> Blocks:
        """What does not work."""
        return self.blocks or PROBLEMS[self.name].blocks

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among others, the worst first."""
        return self.blocked is not Blocks.APPENDS, _ORDER[self.name]

    def as_dict(self, at: str) -> ShownProblem:
        """The problem as a JSON object. at: the place, for its command."""
        kind = PROBLEMS[self.name]
        return {
            "problem": self.name,
            "subject": self.subject,
            "why": self.why,
            "since_ms": self.since_ms,
            "blocks": self.blocked.value,
            "advice": kind.advice,
            "command": (self.command or kind.command).format(at=at, argument=self.argument),
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
