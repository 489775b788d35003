"""A consumer with startpoints over replays: one following replay a partition, begun anew wherever it is sent.

    client.subscribe("orders", consumer="billing", startpoints=StartpointStore.open("out/startpoints"))

`replayed_logs` gives the logs that a LogConsumer of pushrep.startpoints reads.
"""

from collections import deque
from typing import Protocol

from pushrep.records import Record
from pushrep.replay.errors import ReplayRefused, ReplayTruncated
from pushrep.replay.model import FOLLOW, AtTime, RecordingInfo, ReplayRequest
from pushrep.replay.replay import Replay
from pushrep.wire.error_codes import ErrorCode


class Replays(Protocol):
    """What is asked of a ReplayClient."""

    def recordings(self) -> list[RecordingInfo]: ...

    def replay(self, request: ReplayRequest) -> Replay: ...


class ReplayedLog:
    """One recording, read from any offset on by a replay that follows it."""

    def __init__(self, client: Replays, info: RecordingInfo) -> None:
        self._client, self._name = client, info.name
        self.log_id = str(info.log_id or "")
        self._replay: Replay | None = None
        self._position = -1
        self._ahead: deque[Record] = deque()
        self._cut: ReplayTruncated | None = None

    def bounds(self) -> tuple[int, int]:
        """Readable offsets [start, end), now. Raises ReplayRefused (UNKNOWN_RECORDING)."""
        for info in self._client.recordings():
            if info.name == self._name:
                return info.start_offset, max(info.start_offset, info.stable_offset)
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {self._name} any more")

    def first_at(self, ms: int, /) -> int | None:
        """Offset of the first record at or after `ms` since 1970; None if there is none."""
        _, end = self.bounds()
        # FOLLOW alone may begin at the end, where a time is put that no record has reached.
        with self._client.replay(ReplayRequest(self._name, AtTime(ms), length=FOLLOW)) as replay:
            return replay.position if replay.position < end else None

    def fetch(self, position: int, count: int) -> tuple[list[Record], int]:
        """At most `count` of the records that have come from `position` on, and the next position. Never waits.

        A replay that was ended, whoever did it, is begun anew. Raises ReplayTruncated as long as the position stays the
        one that the log was cut below, ReplayFailed, ReplayRefused.
        """
        replay = self._replay
        if replay is None or position != self._position or (replay.end_reason is not None and not self._ahead):
            if self._cut is not None and position == self._position:
                raise self._cut
            self.close()
            replay = self._replay = self._client.replay(ReplayRequest(self._name, position, length=FOLLOW))
            self._position, self._cut = position, None
        if len(self._ahead) < count:
            try:
                self._ahead.extend(replay.poll())
            except ReplayTruncated as error:
                self._cut = error
                raise
        records = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        if self._ahead:
            self._position = records[-1].offset + 1 if records else position
        else:
            self._position = max(position, replay.position)
        return records, self._position

    def close(self) -> None:
        if self._replay is not None:
            replay, self._replay = self._replay, None
            self._ahead.clear()
            replay.close()


def replayed_logs(client: Replays, topic: str, partitions: frozenset[int] | None) -> dict[int, ReplayedLog]:
    """The topic's recordings, all or those of `partitions`. Raises ReplayRefused if one is not there."""
    found = {info.partition: info for info in client.recordings() if info.topic == topic}
    wanted = partitions if partitions is not None else frozenset(found)
    missing = sorted(wanted - found.keys()) if wanted else [0]
    if missing:
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {topic}-{missing[0]}")
    return {partition: ReplayedLog(client, found[partition]) for partition in sorted(wanted)}
