"""What startpoints make of a consumer's partitions: which begin elsewhere, are sent elsewhere, or may not be read.

    comes     begin: the committed position, or where its startpoint says; or stopped
    runs      every look_every_s, if the startpoints' version changed: move, between two reads; or stopped
    stopped   not read, and not committed; the error is told once. Asked about again at each new version

Pure: the shells ask the store, and move their client.
"""

from collections.abc import Iterable, Mapping

from filtering.consumers.reading import NO_MARKS, Reading, TopicPartition
from filtering.consumers.startpoints import Answer, RefusedStartpoint
from filtering.highwater import HighwaterMarks


class Following:
    """See the file's map. Not thread-safe."""

    def __init__(self, reading: Reading, look_every_s: float | None) -> None:
        """look_every_s: None if there are no startpoints to follow."""
        self._reading, self._look_every_s = reading, look_every_s
        self._stopped: dict[TopicPartition, RefusedStartpoint] = {}
        self._began: dict[TopicPartition, int] = {}
        self._untold: list[Exception] = []
        self._next_look_s = 0.0
        self._seen: int | None = None

    @property
    def stopped(self) -> Mapping[TopicPartition, Exception]:
        """Partitions that are assigned and not read, and why."""
        return {partition: refusal.error for partition, refusal in self._stopped.items()}

    def begin(
        self, partition: TopicPartition, offset: int | None, marks: HighwaterMarks, sequence: int, answer: Answer
    ) -> int | None:
        """A partition comes that a run of startpoint `sequence` committed at `offset`. Where the client begins.

        None: by its reset policy. A run that was stopped before it committed anything begins anew where it began.
        """
        offset = self._began.get(partition) if offset is None else offset
        if isinstance(answer, RefusedStartpoint):
            self._stop(partition, answer)
            return offset
        self._let_go(partition)
        if answer is None:
            self._reading.assign(partition, offset, marks, startpoint=sequence)
            return offset
        kept = NO_MARKS if answer.reset_marks else marks
        self._reading.assign(partition, answer.offset, kept, startpoint=answer.sequence, is_new_startpoint=True)
        return answer.offset

    def move(self, partition: TopicPartition, answer: Answer) -> int | None:
        """What `moved` said of a running partition. Where the client is to seek; None: nowhere."""
        if answer is None:
            return None
        if isinstance(answer, RefusedStartpoint):
            self._stop(partition, answer)
            return None
        self._reading.move(partition, answer.offset, answer.sequence, reset_marks=answer.reset_marks)
        return answer.offset

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are gone."""
        gone = list(partitions)
        self._reading.drop(gone)
        for partition in gone:
            self._let_go(partition)

    def is_time(self, now_s: float) -> bool:
        """Whether to ask for the version; by any clock that only goes on."""
        return self._look_every_s is not None and now_s >= self._next_look_s

    def wait_s(self, left_s: float) -> float:
        """So long of `left_s` (below 0: for ever) a client may wait before it is time to ask again."""
        if self._look_every_s is None:
            return left_s
        return self._look_every_s if left_s < 0 else min(left_s, self._look_every_s)

    def is_new(self, version: int) -> bool:
        """Whether there may be something that was not looked at."""
        return version != self._seen

    def looked(self, version: int, now_s: float) -> None:
        """All that there was at `version` is obeyed."""
        assert self._look_every_s is not None, "only followers look"
        self._seen, self._next_look_s = version, now_s + self._look_every_s

    def tell(self) -> None:
        """Raise what the caller was not told yet, one at a time."""
        if self._untold:
            raise self._untold.pop(0)

    def _stop(self, partition: TopicPartition, refusal: RefusedStartpoint) -> None:
        known = self._stopped.get(partition)
        if known is None or known.sequence != refusal.sequence:
            self._untold.append(refusal.error)
        self._stopped[partition] = refusal
        if partition in self._reading and (began := self._reading.began(partition)) is not None:
            self._began[partition] = began
        self._reading.drop([partition])

    def _let_go(self, partition: TopicPartition) -> None:
        self._stopped.pop(partition, None)
        self._began.pop(partition, None)
