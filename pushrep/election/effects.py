"""What the rules ask their caller to do: plain values, carried out in the order in which they come.

An effect is over before the next one begins; "durably" means on disk by then, whatever the durability of records is.
"""

from typing import NamedTuple, TypeAlias

from pushrep.election.epochs import LogEnds
from pushrep.election.findings import RequestFinding
from pushrep.election.grants import Grant
from pushrep.election.messages import AppendRecordsResult, Batch
from pushrep.push_session_end_reason import PushSessionEndReason


class ReplicaSession(NamedTuple):
    """The newest push session a replica has seen. `is_over`: its leader ended it."""

    leader_epoch: int
    session_id: int
    is_over: bool = False


NO_SESSION = ReplicaSession(-1, -1)


class TakeEpoch(NamedTuple):
    """Durably: from now on everything of an older leader is refused. A candidate's own number, too."""

    leader_epoch: int


class StoreGrant(NamedTuple):
    """Durably: the newest grant is this one."""

    grant: Grant


class OpenSession(NamedTuple):
    """The newest push session is this one."""

    session: ReplicaSession


class SetUngrantedAside(NamedTuple):
    """Durably: cut what was appended without a grant, kept as `.cut`, counted, reported; the log is `log` then."""

    log: LogEnds


class Truncate(NamedTuple):
    """Durably: checkpoints are lowered, then the log is cut, which ends at `offset` afterwards.

    An epoch that starts at `offset` stays in the list of epochs.
    """

    offset: int


class SetAside(NamedTuple):
    """Durably: the log goes aside as `.stale`; an empty one begins at `offset`, its start and its watermark there.

    leader_epoch: stands in its list of epochs from the beginning, starting at `offset`: everything below was there when
    this epoch wrote. Without it a crash now would leave a log that seems to be behind every other.
    """

    offset: int
    leader_epoch: int


class Append(NamedTuple):
    """Write these batches behind the log's end, as they are.

    cleaned_offset: where offsets are missing below it, the log's own cleaner's offset is raised over the hole first,
    durably, and what follows the hole goes into a segment of its own.
    """

    batches: tuple[Batch, ...]
    cleaned_offset: int = 0


class BeginEpoch(NamedTuple):
    """Durably: the epoch stands in the log's list of epochs, whether or not it has a record yet."""

    leader_epoch: int
    start_offset: int


class Flush(NamedTuple):
    """Everything that was appended is on disk."""


class SetHighWatermark(NamedTuple):
    """Checkpointed when it suits; it only rises, but for a cut or a log set aside."""

    high_watermark: int


class SetLogStart(NamedTuple):
    """Records below may be removed."""

    log_start_offset: int


class CloseSession(NamedTuple):
    """The leader said that its session is over: nothing more of it is accepted."""

    reason: PushSessionEndReason


class GoOffline(NamedTuple):
    """The log waits for an operator; the others of the node go on."""

    finding: RequestFinding


class Answer(NamedTuple):
    """The last effect: all before it are done."""

    result: AppendRecordsResult


FollowerEffect: TypeAlias = (
    TakeEpoch
    | OpenSession
    | SetUngrantedAside
    | SetAside
    | Truncate
    | Append
    | BeginEpoch
    | Flush
    | SetHighWatermark
    | SetLogStart
    | CloseSession
    | GoOffline
    | Answer
)
