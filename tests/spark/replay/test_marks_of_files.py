"""Files that are created once, on any file system that Spark reads."""

import os

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


@pytest.fixture(params=["org.apache.hadoop.hive.ql.io.ProxyLocalFileSystem", "org.apache.hadoop.fs.LocalFileSystem"])
def local_files(request, spark):
    """Of Spark's package it is Hive's file system, which refuses to rename a file to one that is there; Hadoop's own
    replaces it.
    """
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    own = {"fs.file.impl": request.param, "fs.file.impl.disable.cache": "true"}
    before = {name: settings.get(name) for name in own}
    for name, value in own.items():
        settings.set(name, value)
    yield
    for name, value in before.items():
        settings.unset(name) if value is None else settings.set(name, value)


@pytest.mark.usefixtures("local_files")
def test_of_two_writers_of_one_name_none_puts_the_others_bytes_there(spark, tmp_path, monkeypatch):
    """Each has written its bytes aside before one of them gives them the name."""
    first, second = (HadoopDirectory(spark, str(tmp_path)) for _ in range(2))
    link, seen = os.link, []

    def of_the_second(aside, name):
        monkeypatch.setattr(os, "link", link)
        seen.append(first.create_bytes("marks", b"first"))
        link(aside, name)

    monkeypatch.setattr(os, "link", of_the_second)
    seen.append(second.create_bytes("marks", b"second"))
    assert (seen, first.read("marks")) == ([True, False], "first")
    assert [name for name in first.names() if not name.startswith(".")] == ["marks"], "nothing is left aside"
