"""A directory on whatever file system Spark's Hadoop client knows: local, HDFS, an object store by its connector.

    a file system    a file is there from its opening on    a directory is renamed as one
    an object store  an object is there, whole, from its closing on    a "directory" is renamed object by object
    Azure, flat      an object is there, empty, from its opening on    the same

So a new file is written aside on a file system, under a name that no other writer has, and renamed; in an object store
it is one object, put there on the condition that none has its name (S3's If-None-Match). S3A knows that condition since
Hadoop 3.4.2, and only where it is asked for by name: without, of two writers of one name the second overwrites the
first. Azure's client (ABFS) sets it itself wherever it renames: there a new file is written aside and renamed, too.
"""

import contextlib
import os
from typing import Any, Final
from uuid import uuid4

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from spark_jobs.errors import StoreUnfit
from spark_jobs.spark_internals import hadoop_of

FILE_SYSTEMS: Final = frozenset({"file", "hdfs", "viewfs", "webhdfs", "swebhdfs"})
_AZURE: Final = frozenset({"abfs", "abfss"})
_HIERARCHICAL: Final = "fs.capability.etags.preserved.in.rename"
"""A capability that Azure's client has for an account with a hierarchical namespace, and no object store has."""
_IF_NONE_MATCH: Final = "fs.option.create.conditional.overwrite"
_TWO_WRITERS: Final = (
    "of two drivers that make one new file there the second overwrites the first, so two drivers at once would not be "
    "noticed. S3 needs Hadoop 3.4.2 or newer (Spark 4.1) and a server that obeys If-None-Match; otherwise keep marks "
    "with the rows in a database"
)
_REFUSES_CONDITION: Final = (
    "its server refuses a file that is to be made only if none has its name (If-None-Match). Keep marks with the "
    "rows in a database; for a table alone set fs.s3a.create.conditional.enabled=false"
)
_UNSUPPORTED: Final = "AWSUnsupportedFeatureException"
"""S3A's word for answer 501."""
_HALF_WRITTEN: Final = (
    "a file is seen there while it is being written, so a kill would leave a part of it under the name of the whole. "
    "Keep rows in Delta or in Iceberg and marks on a file system, or both in a database"
)


class HadoopDirectory:
    """One directory; names are relative to it. It need not exist."""

    def __init__(self, session: SparkSession, path: str) -> None:
        instead = "name a catalog table or a database, and keep marks on the server's disk or there"
        self._jvm, configuration = hadoop_of(session, f"files at {path}", instead)
        given = self._jvm.org.apache.hadoop.fs.Path(path)
        self._fs = given.getFileSystem(configuration)
        self._root = self._fs.makeQualified(given)
        scheme = self._root.toUri().getScheme()
        self.renames_directories = scheme in FILE_SYSTEMS or self._fs.hasPathCapability(self._root, _HIERARCHICAL)
        """Whether a directory moves as one: False for an object store."""
        self._puts_by_renaming = scheme in _AZURE

    def path_of(self, name: str) -> str:
        """With its file system's scheme."""
        return str(self._path(name).toString())

    def why_unusable(self) -> str | None:
        """Why it can't be written, as far as that is known without writing; None if it can."""
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
        if not self.renames_directories:  # of these some want an object for the directory, too
            self._fs.mkdirs(self._path(to).getParent())
        return bool(self._fs.rename(self._path(name), self._path(to)))

    def read(self, name: str) -> str:
        """A file's text."""
        return self.read_bytes(name).decode()

    def read_bytes(self, name: str) -> bytes:
        """A file's content."""
        with contextlib.closing(self._fs.open(self._path(name))) as stream:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream))

    def overwrite(self, name: str, text: str) -> None:
        """A file of this text in the place of what is there; a reader meanwhile may see neither. A power cut may undo
        it.
        """
        stream = self._fs.create(self._path(name), True)
        stream.write(bytearray(text.encode()))
        stream.close()

    def create_bytes(self, name: str, data: bytes) -> bool:
        """Whole or not at all; False where `name` is there already, in an object store also if another was faster.

        On a file system a file that replaces another may be read with the other's checksum.
        """
        return self._renamed_new(name, data) if self.renames_directories else self._put_new(name, data)

    def check_new_objects(self, below: str = "", *, once: bool) -> None:
        """Raises StoreUnfit for an object store that shows an object before it is whole, refuses conditional writes,
        or, where only one writer may create it (`once`), lets two of them. Tries it in the directory `below` this one,
        and leaves nothing behind but after a kill; a file system needs no check.
        """
        if self.renames_directories:
            return
        name = f"{below}/_probe-{uuid4().hex}.new".removeprefix("/")
        try:
            if self._puts_by_renaming:
                self._put_new(name, b"1")
                if once and self._put_new(name, b"2"):
                    raise StoreUnfit(self.path_of(""), _TWO_WRITERS)
                return
            first = self._opened_new(name)
            first.write(bytearray(b"1"))
            if self._fs.exists(self._path(name)):
                with contextlib.suppress(Py4JJavaError):
                    first.close()
                raise StoreUnfit(self.path_of(""), _HALF_WRITTEN)
            if not once:
                first.close()
            elif not self._refuses_second(name, first):
                raise StoreUnfit(self.path_of(""), _TWO_WRITERS)
        except Py4JJavaError as error:
            if _UNSUPPORTED in error.java_exception.getClass().getName():
                raise StoreUnfit(self.path_of(""), _REFUSES_CONDITION) from error
            raise
        finally:
            self.remove(name)

    def _refuses_second(self, name: str, first: Any) -> bool:
        """Whether, of two writers that have opened one new file, the second fails to close it. Closes the first."""
        try:
            second = self._opened_new(name)
            second.write(bytearray(b"2"))
            first.close()
            second.close()
        except Py4JJavaError:
            if self._fs.exists(self._path(name)) and self.read_bytes(name) == b"1":
                return True
            raise
        return False

    def _write(self, name: str, data: bytes) -> None:
        with contextlib.closing(self._fs.create(self._path(name), False)) as stream:
            stream.write(bytearray(data))
            stream.hsync()  # on the disks: what a store confirms must survive the machine

    def _opened_new(self, name: str) -> Any:
        builder = self._fs.createFile(self._path(name)).recursive().overwrite(False)
        if self._fs.hasPathCapability(self._root, _IF_NONE_MATCH):  # else S3A with it switched off refuses the option
            builder = builder.opt(_IF_NONE_MATCH, "true")
        return builder.build()

    def _put_new(self, name: str, data: bytes) -> bool:
        try:
            if not self._puts_by_renaming:
                stream = self._opened_new(name)
                stream.write(bytearray(data))
                stream.close()
                return True
            if self._renamed_new(name, data):
                return True
        except Py4JJavaError:
            if not self._fs.exists(self._path(name)):
                raise
        # If an answer is lost, the client asks again and is refused: the object itself shows who wrote it.
        return self.read_bytes(name) == data

    def _renamed_new(self, name: str, data: bytes) -> bool:
        aside = f"{name}.writing-{uuid4().hex}"
        try:
            self._write(aside, data)
            if self._root.toUri().getScheme() == "file":  # where Hadoop's own client replaces what has the name
                with contextlib.suppress(OSError):  # it has it, or there are no links here
                    os.link(*(str(self._path(one).toUri().getPath()) for one in (aside, name)))
                    return True
            return not self._fs.exists(self._path(name)) and self.rename(aside, name)
        finally:
            self.remove(aside)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root
