"""FileMarks: a foreachBatch query's marks as files, one for each batch, on whatever file system Spark writes to.

    <path>/00000000000000000017-5-<query id>.marks       the 17th write: batch 5 of that query (batch_marks.py)

A path without a scheme, or with file:, is a directory of this machine, which needs no Spark. Others are reached by
Spark's file systems (sinks/hadoop.py). A file is there whole or not at all; of one batch the one written last counts.
Of two drivers of one query the one that writes second finds a file that it does not know, or its own next name taken,
and fails with MarksFenced.
"""

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from spark_jobs.batch_marks import BatchMarks, MarksFenced, MarksStoreDamaged, parsed_marks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.sinks.hadoop import HadoopDirectory

_NAME = re.compile(r"([0-9]{20})-([0-9]{1,19})-([A-Za-z0-9_-]+)\.marks")
_WRITING = ".writing"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}


def local_path(text: str) -> Path | None:
    """The path on this machine that a directory's name means; None on another file system.

    Without a scheme it is taken for local, whatever Spark's default file system is.
    """
    scheme, colon, rest = text.partition(":")
    if colon and "/" not in scheme:
        return Path("/" + rest.lstrip("/")) if scheme == "file" else None
    return Path(text)


class _File(NamedTuple):
    sequence: int
    batch_id: int
    query_id: str

    @property
    def name(self) -> str:
        return f"{self.sequence:020d}-{self.batch_id}-{self.query_id}.marks"


_NOTHING = _File(-1, -1, "")


class LocalDirectory:
    """A directory of this machine, as HadoopDirectory is one of another file system; made when its first file is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_tidy = False

    def names(self) -> list[str]:
        return os.listdir(self._path) if self._path.is_dir() else []

    def read_bytes(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def create_bytes(self, name: str, data: bytes) -> bool:
        self._make()
        aside = self._path / f".{uuid4().hex}{_WRITING}"
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            is_new = _linked(aside, self._path / name)
        finally:
            aside.unlink(missing_ok=True)
        _sync_directory(self._path)
        return is_new

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def _make(self) -> None:
        """Make the directory, or remove what a killed writer left in it; one that still writes finds its name gone."""
        missing = [path for path in (self._path, *self._path.parents) if not path.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _sync_directory(path.parent)
        if not self._is_tidy:
            for left in self.names():
                if left.endswith(_WRITING):
                    self.remove(left)
        self._is_tidy = True

    def sync(self) -> None:
        """Make removals durable."""
        if self._path.is_dir():
            _sync_directory(self._path)


def _linked(aside: Path, path: Path) -> bool:
    """Give a file its name, unless another has it, or has removed this one."""
    try:
        os.link(aside, path)
    except (FileExistsError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        aside.rename(path)  # of two writers in the same instant the later one would win here
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileMarks:
    """Marks in a directory of this machine, or of any file system that Spark knows, for ReplayFilteredBatches.

    path: a directory of their own, beside the checkpoint. session: for another file system; the active one if none is
    given. read_only: to look at the marks of a running query. Once `write` has returned, marks survive kill -9, and on
    a file system power loss. Use raises MarksFenced if another driver wrote since this store was first used, StoreUnfit
    for an object store that lets two writers create one file or shows it before it is whole, MarksStoreDamaged for a
    file that can't be read, OSError, and what Hadoop's client raises.
    """

    def __init__(self, path: str | Path, session: "SparkSession | None" = None, *, read_only: bool = False) -> None:
        self.location = str(path)
        self._session, self._read_only = session, read_only
        place = local_path(self.location)
        self._directory: LocalDirectory | HadoopDirectory | None = None if place is None else LocalDirectory(place)
        if place is None:  # not in the first batch: the package's files may be others by then
            import spark_jobs.sinks.hadoop  # noqa: F401, PLC0415 - slow to import, not needed for this machine's disk
        self._last: _File | None = None  # the newest write that this store has seen or made
        self._latest: tuple[_File, BatchMarks] | None = None  # what was read or written last

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
        file = found[-1]
        if self._latest is None or self._latest[0] != file:
            try:
                data = self._opened().read_bytes(file.name)
            except FileNotFoundError:  # the running query has just removed it
                return None
            self._latest = file, parsed_marks(data, f"{self.location}/{file.name}", (query_id, batch_id))
        return self._latest[1]

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; see MarksStore."""
        files = self._files()
        new = _File(files[-1].sequence + 1 if files else 0, marks.batch_id, marks.query_id)
        if _NAME.fullmatch(new.name) is None:
            raise MarksStoreDamaged(f"marks at {self.location}: a query id {marks.query_id!r} is no name of a file")
        if not self._opened().create_bytes(new.name, marks.to_bytes()):
            raise MarksFenced(self.location, marks.query_id, marks.batch_id)
        self._last, self._latest = new, (new, marks)
        for file in files:
            if file[1:] == new[1:] or marks.drops(file.query_id, file.batch_id, keep):
                self._opened().remove(file.name)

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, the highest first: killed in between, no hole is left."""
        files = self._files()
        own = [file for file in files if file.query_id == query_id and file.batch_id >= batch_id]
        for file in sorted(own, key=lambda file: -file.batch_id):
            self._opened().remove(file.name)
        if isinstance(self._directory, LocalDirectory):
            self._directory.sync()
        self._last = max((file for file in files if file not in own), default=_NOTHING)

    def _files(self) -> list[_File]:
        """In the order in which they were written."""
        matches = map(_NAME.fullmatch, self._opened().names())
        files = sorted(_File(int(m[1]), int(m[2]), m[3]) for m in matches if m is not None)
        if self._read_only:
            return files
        newest = files[-1] if files else _NOTHING
        self._last = self._last or newest
        if newest != self._last:
            later = max(newest, self._last)
            raise MarksFenced(self.location, later.query_id, later.batch_id)
        return files

    def _opened(self) -> "LocalDirectory | HadoopDirectory":
        if self._directory is None:
            from pyspark.sql import SparkSession  # noqa: PLC0415 - loaded with the next one

            from spark_jobs.sinks.hadoop import HadoopDirectory  # noqa: PLC0415

            directory = HadoopDirectory(self._session or SparkSession.active(), self.location)
            if not self._read_only:
                directory.check_new_objects(once=True)
            self._directory = directory
        return self._directory
