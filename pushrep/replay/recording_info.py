"""RecordingInfo: a recording as `ReplayClient.recordings` tells it."""

from dataclasses import dataclass
from uuid import UUID

from pushrep.log.slots import shown_name
from pushrep.protocol.replay_messages import RecordingState


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingInfo:
    """A recording as it is now. `recording_id` None: no catalogue knows it. `is_live`: somebody writes it.

    Offsets [start_offset, end_offset) were written, those below `stable_offset` are never taken back; a log
    that the catalogue holds for INVALID may not be readable. A node tells of no offset above the stable one while
    the log is live. `outbox_id`: whose log it is, None if that is not known. `partition`: where a directory has worker
    slots, a number of its own for each slot's (pushrep.log.slots).
    """

    recording_id: int | None
    topic: str
    partition: int
    log_id: UUID | None
    start_offset: int
    stable_offset: int
    end_offset: int
    is_live: bool
    state: RecordingState
    outbox_id: UUID | None = None

    @property
    def name(self) -> str:
        """`<topic>-<partition>`, which a request may name it by; of a worker slot `slot-<m>/<topic>-<n>`."""
        return shown_name(self.topic, self.partition)
