"""FileMarks: a foreachBatch query's marks as files, one for each batch, on whatever file system Spark writes to.

    <path>/00000000000000000017-5-<query id>.marks       the 17th write: batch 5 of that query (batch_marks.py)

For drivers that may move: the files lie beside the checkpoint, where the next driver finds both. A file is there whole
or not at all (sinks/hadoop.py); of one batch the one written last counts. Of two drivers of one query the one that
writes second finds a file that it does not know, or its own next name taken, and fails with MarksFenced: in an object
store and on HDFS always, on a local or mounted disk unless both write in the same instant.
"""

import re
from typing import NamedTuple

from pyspark.sql import SparkSession

from spark_jobs.batch_marks import BatchMarks
from spark_jobs.marks import MarksFenced, MarksStoreDamaged, parsed_marks
from spark_jobs.sinks.hadoop import HadoopDirectory

_NAME = re.compile(r"([0-9]{20})-([0-9]{1,19})-([A-Za-z0-9_-]+)\.marks")


class _File(NamedTuple):
    sequence: int
    batch_id: int
    query_id: str

    @property
    def name(self) -> str:
        return f"{self.sequence:020d}-{self.batch_id}-{self.query_id}.marks"


_NOTHING = _File(-1, -1, "")


class FileMarks:
    """Marks in a directory of any file system that Spark knows, for ReplayFilteredBatches.

    path: a directory of their own, beside the checkpoint. session: the active one if none is given. check: whether the
    first use tests that an object store lets only one writer create a file, and shows it whole; for reading alone it
    need not. Use raises StoreUnfit for a store that does not, MarksFenced if another driver wrote since this store was
    first used, MarksStoreDamaged for a file that can't be read, and what Hadoop's client raises.
    """

    def __init__(self, path: str, session: SparkSession | None = None, *, check: bool = True) -> None:
        self.location = path
        self._session, self._check = session, check
        self._directory: HadoopDirectory | None = None
        self._last: _File | None = None  # the newest write that this store has seen or made

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""
        files = self._files()
        return files[-1].query_id if files else None

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending."""
        return sorted({file.batch_id for file in self._files() if file.query_id == query_id})

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """What was written last for this batch; None if nothing was, or it was dropped."""
        found = [file for file in self._files() if (file.query_id, file.batch_id) == (query_id, batch_id)]
        if not found:
            return None
        name = found[-1].name
        return parsed_marks(self._opened().read_bytes(name), f"{self.location}/{name}", (query_id, batch_id))

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; see MarksStore."""
        files = self._files()
        new = _File(files[-1].sequence + 1 if files else 0, marks.batch_id, marks.query_id)
        if _NAME.fullmatch(new.name) is None:
            raise MarksStoreDamaged(self.location, f"a query id {marks.query_id!r} is no name of a file")
        if not self._opened().create_bytes(new.name, marks.to_bytes()):
            raise MarksFenced(self.location, marks.query_id, marks.batch_id)
        self._last = new
        for file in files:
            if file[1:] == new[1:] or marks.drops(file.query_id, file.batch_id, keep):
                self._opened().remove(file.name)

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, the highest first: killed in between, no hole is left."""
        files = self._files()
        own = [file for file in files if file.query_id == query_id and file.batch_id >= batch_id]
        for file in sorted(own, key=lambda file: -file.batch_id):
            self._opened().remove(file.name)
        self._last = max((file for file in files if file not in own), default=_NOTHING)

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _files(self) -> list[_File]:
        """In the order in which they were written."""
        matches = map(_NAME.fullmatch, self._opened().names())
        files = sorted(_File(int(m[1]), int(m[2]), m[3]) for m in matches if m is not None)
        newest = files[-1] if files else _NOTHING
        self._last = self._last or newest
        if newest != self._last:
            later = max(newest, self._last)
            raise MarksFenced(self.location, later.query_id, later.batch_id)
        return files

    def _opened(self) -> HadoopDirectory:
        if self._directory is None:
            session = self._session or SparkSession.getActiveSession()
            if session is None:
                raise MarksStoreDamaged(self.location, "no Spark session is active here: give one")
            self._directory = HadoopDirectory(session, self.location)
            if self._check:
                self._directory.check_new_objects(once=True)
        return self._directory
