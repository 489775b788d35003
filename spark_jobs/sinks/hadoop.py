"""A directory on whatever file system Spark's Hadoop client knows: local, HDFS, an object store by its connector."""

import os
from typing import Any, cast

from pyspark.sql import SparkSession


class HadoopDirectory:
    """One directory; names are relative to it. It need not exist."""

    def __init__(self, session: SparkSession, path: str) -> None:
        context = cast("Any", session.sparkContext)
        self._jvm = context._jvm  # noqa: SLF001 - the Hadoop client has no Python door
        configuration = context._jsc.hadoopConfiguration()  # noqa: SLF001
        given = self._jvm.org.apache.hadoop.fs.Path(path)
        self._fs = given.getFileSystem(configuration)
        self._root = self._fs.makeQualified(given)

    def path_of(self, name: str) -> str:
        """With its file system's scheme."""
        return str(self._path(name).toString())

    def is_file(self) -> bool:
        """Whether a file stands where the directory should."""
        return bool(self._fs.exists(self._root) and not self._fs.getFileStatus(self._root).isDirectory())

    def why_unusable(self) -> str | None:
        """What keeps it from being written, as far as that shows without writing; None if nothing does."""
        place = self._root
        while not self._fs.exists(place):
            place = place.getParent()
        where = str(place.toUri().getPath())
        if not self._fs.getFileStatus(place).isDirectory():
            return "is a file" if place.equals(self._root) else f"{where} is a file"
        # Hadoop's own answer reads the permission bits alone, and is wrong for root and for lists of access rights.
        if self._root.toUri().getScheme() == "file" and not os.access(where, os.W_OK | os.X_OK, effective_ids=True):
            return f"{where} is not writable"
        return None

    def names(self, below: str = "") -> list[str]:
        """What lies in it, or in a directory `below` it; nothing if that does not exist."""
        path = self._path(below)
        if not self._fs.exists(path):
            return []
        return [str(status.getPath().getName()) for status in self._fs.listStatus(path)]

    def remove(self, name: str) -> None:
        """A file, or a directory with all it holds; gone already is fine."""
        self._fs.delete(self._path(name), True)

    def rename(self, name: str, to: str) -> bool:
        """False if the file system refuses."""
        return bool(self._fs.rename(self._path(name), self._path(to)))

    def read(self, name: str) -> str:
        """A file's text."""
        return self.read_bytes(name).decode()

    def read_bytes(self, name: str) -> bytes:
        """A file's content."""
        stream = self._fs.open(self._path(name))
        try:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream))
        finally:
            stream.close()

    def create(self, name: str, text: str) -> bool:
        """A file of this text, as `create_bytes`."""
        return self.create_bytes(name, text.encode())

    def create_bytes(self, name: str, data: bytes) -> bool:
        """Whole or not at all. `name` must be new: a file that replaces another may meet the other's checksum."""
        stream = self._fs.create(self._path(name + ".writing"), True)  # over what a kill left aside
        try:
            stream.write(bytearray(data))
            stream.hsync()  # on the disks: what a store says is written must survive the machine
        finally:
            stream.close()
        return self.rename(name + ".writing", name)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root
