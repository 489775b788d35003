"""`pushrep marks` on marks in files, on any file system that Spark reads."""

import json

import pytest
from click.testing import CliRunner

from filtering.marks import HighwaterMarks
from spark_jobs import idempotent_table
from spark_jobs.batch_marks import BatchMarks, MarksKey
from spark_jobs.errors import StoreUnfit
from spark_jobs.file_marks import FileMarks
from spark_jobs.marks import MarksFenced
from spark_jobs.marks_command import marks
from spark_jobs.sinks.hadoop import HadoopDirectory

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_are_shown_exported_and_reset(spark, tmp_path, scheme):
    place = f"{scheme}{tmp_path / 'marks'}"
    store = FileMarks(place, spark)
    held = [BatchMarks("q", n, (), {MarksKey("orders"): HighwaterMarks.from_columns([7], [1], [n])}) for n in range(2)]
    for batch in held:
        store.write(batch, keep=9)
    told = CliRunner().invoke(marks, ["show", place, "--json"])
    assert json.loads(told.output)["batches"] == [0, 1]
    done = CliRunner().invoke(marks, ["reset", place, "--export", str(tmp_path / "out"), "--yes"])
    assert done.exit_code == 0, done.output
    assert BatchMarks.from_bytes((tmp_path / "out").read_bytes()) == held[1]
    assert FileMarks(place, spark).owner() is None
    with pytest.raises(MarksFenced, match="batch 1 of query q"):
        store.read("q", 1)  # a driver that runs meanwhile must not go on


def test_an_unknown_store_that_shows_files_half_written_is_refused_by_name(spark, tmp_path):
    """A kill would leave a part of a file there, under the name of the whole."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    settings.set("fs.unknown.impl", "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme")
    settings.set("fs.viewfs.overload.scheme.target.file.impl", "org.apache.hadoop.fs.LocalFileSystem")
    settings.set("fs.viewfs.mounttable.store.link./held", tmp_path.as_uri())
    with pytest.raises(StoreUnfit, match=r"unknown://store/held/marks: a file is seen there while it is being written"):
        FileMarks("unknown://store/held/marks", spark).owner()
    with pytest.raises(StoreUnfit, match="rows in Delta, in Iceberg"):
        idempotent_table("unknown://store/held/table")(spark.range(1), 0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_of_two_writers_of_one_name_none_puts_the_others_bytes_there(spark, tmp_path):
    """Each has written its bytes aside before one of them renames."""
    first, second = (HadoopDirectory(spark, str(tmp_path)) for _ in range(2))
    rename_first, rename_second, seen = first.rename, second.rename, []

    def of_the_first(name, to):
        def of_the_second(name_of_second, to):
            seen.append((rename_first(name, to), first.read(to)))
            return rename_second(name_of_second, to)

        second.rename = of_the_second
        seen.append((second.create(to, "second"), first.read(to)))
        return seen[0][0]

    first.rename = of_the_first
    first.create("marks", "first")
    assert seen == [(True, "first"), (False, "first")]
