"""PushSession: what the manager knows of one partition's replica: identifiers, and whom to tell.

Newer identifiers win: leader epoch, then replica epoch, then session id. The rules of the session stand in
pushrep/replication (progress.py, sessions.py); it belongs to a LedPartition, under whose lock they are asked.
"""

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pushrep.push.settings import Replica
from pushrep.push_session_end_reason import PushSessionEndReason
from pushrep.replication.progress import SessionId

if TYPE_CHECKING:
    from pushrep.push.led_partition import LedPartition


class PushSession:
    """One session with one replica of one partition. Made by `LedPartition.start_session`."""

    __slots__ = (
        "_lock",
        "_told_watermarks",
        "ended",
        "id",
        "log_end_offset",
        "log_start_offset",
        "partition",
        "replica",
        "started",
        "trouble",
    )

    def __init__(
        self, leader_epoch: int, replica_epoch: int, session_id: int, replica: Replica, partition: "LedPartition"
    ) -> None:
        self.id = SessionId(leader_epoch, replica_epoch, session_id)
        self.replica, self.partition = replica, partition
        self.started: Future[bool] = Future()
        """True at the first success; False if the session ended before it."""
        self.ended: PushSessionEndReason | None = None
        self.trouble = ""
        """Why it can't go on until somebody does something, if that is known here."""
        self.log_end_offset = self.log_start_offset = -1
        """The replica's, as its last success said; -1 before one."""
        self._told_watermarks = (-1, -1)
        self._lock = threading.Lock()

    def on_append_records_response(self, log_end_offset: int, log_start_offset: int) -> bool:
        """A success: the replica's ends. Whether a watermark has risen by it, so that requests may be complete."""
        self.log_end_offset, self.log_start_offset = log_end_offset, log_start_offset
        watermarks = (self.partition.high_watermark, log_start_offset)
        rose = watermarks > self._told_watermarks
        self._told_watermarks = watermarks
        if not self.started.done():
            self.started.set_result(True)
        return rose

    def try_complete_delayed_requests(self) -> None:
        """Whoever waits for a watermark that has risen is called back."""
        self.partition.complete_waiting()

    def on_push_session_ended(self, reason: PushSessionEndReason) -> None:
        """It is over, for this reason; the first one counts."""
        with self._lock:
            if self.ended is not None:
                return
            self.ended = reason
        if not self.started.done():
            self.started.set_result(False)
