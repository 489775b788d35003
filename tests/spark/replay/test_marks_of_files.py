"""Files that are created once, on any file system that Spark reads."""

import pytest

from spark_jobs import idempotent_table
from spark_jobs.errors import StoreUnfit
from spark_jobs.file_marks import FileMarks
from spark_jobs.sinks.hadoop import HadoopDirectory

pytestmark = pytest.mark.spark


def test_an_unknown_store_that_shows_files_half_written_is_refused_by_name(spark, tmp_path):
    """A kill would leave a part of a file there, under the name of the whole."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    settings.set("fs.unknown.impl", "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme")
    settings.set("fs.viewfs.overload.scheme.target.file.impl", "org.apache.hadoop.fs.LocalFileSystem")
    settings.set("fs.viewfs.mounttable.store.link./held", tmp_path.as_uri())
    with pytest.raises(StoreUnfit, match=r"unknown://store/held/marks: a file is seen there while it is being written"):
        FileMarks("unknown://store/held/marks", spark).owner()
    table = idempotent_table("unknown://store/held/table")
    table.expect("q", 0, ())
    with pytest.raises(StoreUnfit, match="rows in Delta or in Iceberg"):
        table(spark.range(1), 0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture
def files_of_sparks_package(spark):
    """The local file system of Spark's package is Hive's, which refuses to rename a file to one that is there; Hadoop's
    own, and so that of tests/conftest.py, replaces it.
    """
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    own = {"fs.file.impl": "org.apache.hadoop.hive.ql.io.ProxyLocalFileSystem", "fs.file.impl.disable.cache": "true"}
    before = {name: settings.get(name) for name in own}
    for name, value in own.items():
        settings.set(name, value)
    yield
    for name, value in before.items():
        settings.unset(name) if value is None else settings.set(name, value)


@pytest.mark.usefixtures("files_of_sparks_package")
def test_of_two_writers_of_one_name_none_puts_the_others_bytes_there(spark, tmp_path):
    """Each has written its bytes aside before one of them renames."""
    first, second = (HadoopDirectory(spark, str(tmp_path)) for _ in range(2))
    rename_first, rename_second, seen = first.rename, second.rename, []

    def of_the_first(name, to):
        def of_the_second(name_of_second, to):
            seen.append((rename_first(name, to), first.read(to)))
            return rename_second(name_of_second, to)

        second.rename = of_the_second
        seen.append((second.create_bytes(to, b"second"), first.read(to)))
        return seen[0][0]

    first.rename = of_the_first
    first.create_bytes("marks", b"first")
    assert seen == [(True, "first"), (False, "first")]
