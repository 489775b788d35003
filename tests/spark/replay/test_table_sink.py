"""The idempotent table: a batch may be written any number of times, by the query that owns the table and no other."""

import contextlib
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql.classic.dataframe import DataFrame

from filtering import HighwaterMarks
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import FilterRule
from spark_jobs.decide import PartitionRows
from spark_jobs.errors import CantReplace, CheckpointWentBack
from spark_jobs.replacing import Replacing, RereadBatch, RowsWanted
from spark_jobs.sinks.catalog_table import idempotent_table
from spark_jobs.sinks.directory_table import DirectoryTable
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.idempotent_sink import BadSink, Owners, TableNotOurs

pytestmark = pytest.mark.spark


@pytest.fixture(params=["parquet", pytest.param("orc", marks=pytest.mark.long), "catalog"])
def kind(request):
    return request.param


@pytest.fixture
def table(spark, tmp_path, kind):
    """(make(adopt=None) -> sink, read() -> {batch_id: ids})"""
    if kind == "catalog":
        name = f"t{abs(hash(tmp_path))}"
        yield (
            lambda **more: idempotent_table(name, **more),
            lambda: _grouped(spark.sql(f"select batch_id, id from {name}").collect()),
        )
        spark.sql(f"drop table if exists {name}")
    else:
        path = str(tmp_path / "table")
        yield (
            lambda **more: idempotent_table(path, kind, **more),
            lambda: _grouped(spark.read.schema("id long, batch_id long").format(kind).load(path).collect()),
        )


def _grouped(rows):
    found = {}
    for row in rows:
        found.setdefault(row["batch_id"], []).append(row["id"])
    return {batch: sorted(values) for batch, values in found.items()}


def told(sink, batch_id, query_id="q"):
    """The sink, as the form tells it what comes."""
    sink.expect(query_id, batch_id, ())
    return sink


def test_batches_are_replaced_and_taken_back(spark, table):
    make, read = table
    sink = make()
    for n in range(3):
        told(sink, n)(spark.range(n * 10, n * 10 + 3), n)
    told(sink, 1)(spark.range(10, 12), 1)
    assert read() == {0: [0, 1, 2], 1: [10, 11], 2: [20, 21, 22]}
    told(make(), 1)(spark.range(0), 1)
    assert read() == {0: [0, 1, 2], 2: [20, 21, 22]}, "a batch without rows replaces too, also after a restart"
    told(sink, 1).drop_from(1)
    assert read() == {0: [0, 1, 2]}
    told(make(), 0).drop_from(0)
    assert read() == {}


def test_a_table_belongs_to_one_query_until_another_adopts_it(spark, table):
    make, read = table
    for n in range(4):
        told(make(), n, "old")(spark.range(n, n + 1), n)
    with pytest.raises(TableNotOurs, match=r"written by query old, this is query new.*adopt=\('old'"):
        told(make(), 0, "new")(spark.range(5), 0)
    with pytest.raises(TableNotOurs):
        told(make(adopt=("stranger", 1)), 0, "new")(spark.range(5), 0)
    assert read() == {0: [0], 1: [1], 2: [2], 3: [3]}, "a refusal changes nothing"
    told(make(adopt=("old", 1)), 2, "new")(spark.range(7, 8), 2)
    assert read() == {0: [0], 1: [1], 2: [7]}, "what came after the adopted batch went, the new one follows"
    with pytest.raises(BadSink, match=r"batch_id=0: the query continues after batch 1.*adopt="):
        told(make(adopt=("old", 1)), 0, "new")(spark.range(9, 10), 0)
    told(make(adopt=("old", 1)), 3, "new")(spark.range(8, 9), 3)
    told(make(adopt=("old", 1)), 3, "new").drop_from(3)
    assert read() == {0: [0], 1: [1], 2: [7]}
    with pytest.raises(TableNotOurs, match="by query new"):
        told(make(), 4, "old")(spark.range(5), 4)


def test_faults_f8_a_sink_is_told_its_query_and_writes_from_any_thread(spark, table):
    """No property of the calling thread says which query runs; a sink that was told nothing writes nothing."""
    make, read = table
    sink = make()
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(BadSink, match="nobody told the sink whose batch this is"):
            threads.submit(sink, spark.range(3), 0).result()
        told(sink, 0)
        threads.submit(sink, spark.range(3), 0).result()
        with pytest.raises(BadSink, match="nobody told the sink"):
            threads.submit(sink, spark.range(3), 1).result()
    assert read() == {0: [0, 1, 2]}
    with pytest.raises(TableNotOurs, match="written by query q, this is query other"):
        told(make(), 0, "other")(spark.range(1), 0)
    with pytest.raises(TableNotOurs, match="by query q by this very object, and this is query other"):
        told(sink, 0, "other")  # which may run beside it, and would write its rows as the other's


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_faults_f8_sinks_in_threads_change_no_setting_of_the_session(spark, tmp_path, watch, mode):
    """What they write is the same in any session, and a user's frame that is written meanwhile is written as the
    user has set.
    """
    watch.given("spark.sql.sources.partitionOverwriteMode", mode)

    def rows(low, high, text):
        return spark.range(low, high, 1, 1).selectExpr(
            "'t' topic", "0 `partition`", "id `offset`", "id % 2 odd", f"'{text}' text"
        )

    def write(target):
        def sink(batch_id):
            return told(idempotent_table(target, partition_by=["odd", "text"]), batch_id)

        for number in range(3):
            sink(number)(rows(number * 4, number * 4 + 4, "01"), number)
        sink(2)(rows(8, 9, "02"), 2)  # other rows, of fewer partitions
        if "/" in target:
            sink(3).replace(rows(6, 10, "03"), 3, [LogRange("t", 0, 6, 10)])
        schema = "`offset` long, text string, batch_id long"
        found = spark.read.schema(schema).parquet(target) if "/" in target else spark.table(target)
        return sorted((row["offset"], row["text"], row["batch_id"]) for row in found.collect())

    targets = [str(tmp_path / "one"), str(tmp_path / "two"), "in_threads_one", "in_threads_two"]
    with watch.over(spark), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(write, targets))
    first = [(n, "01", n // 4) for n in range(6)]
    assert found[:2] == 2 * [first + [(n, "03", 3) for n in range(6, 10)]]
    assert found[2:] == 2 * [[*first, (6, "01", 1), (7, "01", 1), (8, "02", 2)]]
    assert spark.sql("show views").isEmpty()
    watch.check()
    for name in targets[2:]:
        spark.sql(f"drop table {name}")


def test_faults_f7_a_table_says_which_batch_it_holds_as_the_newest(spark, table):
    make, _ = table
    sink = told(make(), 0)
    assert sink.last_batch(spark) == -1
    for n, rows in enumerate((2, 1, 0)):
        told(sink, n)(spark.range(rows), n)
    assert told(make(), 2).last_batch(spark) == told(make(), 1).last_batch(spark) == 2
    told(sink, 1).drop_from(1)
    assert told(make(), 0).last_batch(spark) == 0


def test_what_a_kill_left_aside_is_never_seen(spark, tmp_path):
    path = tmp_path / "table"
    told(idempotent_table(str(path)), 0)(spark.range(3), 0)
    aside = path / "_pushrep" / "writing" / "batch_id=1"
    aside.parent.mkdir(exist_ok=True)
    (path / "batch_id=0").rename(aside)  # killed after a whole write, before the rename
    (path / "_pushrep" / "owners-2.json.writing").write_text("{")
    told(idempotent_table(str(path)), 1)(spark.range(5), 1)
    assert _grouped(spark.read.parquet(str(path)).select("batch_id", "id").collect()) == {1: [0, 1, 2, 3, 4]}
    assert ds.dataset(path, format="parquet", partitioning="hive").count_rows() == 5, "so do other readers"
    assert not list((path / "_pushrep").glob("writing/*/*"))


def test_of_two_drivers_of_one_batch_only_the_last_to_begin_writes_it(spark, tmp_path, monkeypatch):
    """The second begins before a step of the first, and runs to its end or is killed before a step of its own."""
    running = [[0, None]]  # of the drivers, the inner one last: its steps up to then, and what happens

    def stepping(inner):
        def stepped(*told):
            running[-1][0] -= 1
            if running[-1][0] == 0:
                running[-1][1]()
            return inner(*told)

        return stepped

    steps = ["overwrite", "remove", "_write_aside", "_refuse_if_not_last"]
    for name in steps:
        place = HadoopDirectory if hasattr(HadoopDirectory, name) else DirectoryTable
        monkeypatch.setattr(place, name, stepping(getattr(place, name)))

    def written_by_driver(path, step, then):
        running.append([step, then])
        try:
            told(idempotent_table(path), 0)(spark.range(4).repartition(2), 0)
        except KeyboardInterrupt:
            return False
        except BadSink as error:
            if "another driver began to write there" not in str(error):
                raise
            return False
        finally:
            running.pop()
        return True

    def killed():
        raise KeyboardInterrupt

    begun = 3  # the first step is the removal of what an earlier replacement left
    for of_first, of_second in itertools.product(range(2, 6), (begun, begun + 1, begun + 2, 99)):
        path, second = str(tmp_path / f"{of_first}-{of_second}"), []
        assert written_by_driver(path, 99, killed)
        is_written = written_by_driver(
            path, of_first, lambda at=path, to=of_second, told=second: told.append(written_by_driver(at, to, killed))
        )
        assert (is_written, *second) == (of_first < begun, of_second == 99), (of_first, of_second)
        rows = [row["id"] for row in spark.read.parquet(path).collect()]
        assert sorted(rows) == [0, 1, 2, 3], (of_first, of_second)


def test_a_batch_that_replaces_others_rows_ends_right_wherever_it_was_stopped(spark, tmp_path, monkeypatch):
    """Stopped behind each step on the file system, and run again by the next process."""

    def rows(low, high, text):
        columns = "'t' as topic", "0 as partition", "id as `offset`", f"'{text}' as text"
        return spark.range(low, high, 1, 1).selectExpr(*columns)

    def sink(name, batch_id=2):
        return told(idempotent_table(str(tmp_path / name), partition_by=["text"]), batch_id)

    for number in range(2):
        sink("before", number)(rows(number * 4, number * 4 + 4, "01"), number)  # a text that looks like a number
    again = LogRange("t", 0, 6, 10)
    assert sink("before").held_until(spark, again, 2) == 8
    assert sorted(row[0] for row in sink("before", 1).held(spark, again._replace(start=2), 1).collect()) == [2, 3]
    expected = [(n, "new" if n >= 6 else "01", 2 if n >= 6 else n // 4) for n in range(10)]
    left = itertools.count()

    def stopping(inner):
        def step(*told):
            result = inner(*told)
            if next(left) == 0:
                raise KeyboardInterrupt
            return result

        return step

    for name in ("remove", "rename"):
        monkeypatch.setattr(HadoopDirectory, name, stopping(getattr(HadoopDirectory, name)))
    parts = ds.partitioning(pa.schema([("batch_id", pa.int64()), ("text", pa.string())]), flavor="hive")
    for steps in range(20):
        shutil.copytree(tmp_path / "before", tmp_path / str(steps))
        left = itertools.count(-steps)
        with contextlib.suppress(KeyboardInterrupt):
            sink(str(steps)).replace(rows(6, 10, "new"), 2, [again])
            break
        left = itertools.count(1)
        sink(str(steps)).replace(rows(6, 10, "new"), 2, [again])
        found = ds.dataset(tmp_path / str(steps), format="parquet", partitioning=parts).to_table()
        rows_found = sorted((row["offset"], row["text"], row["batch_id"]) for row in found.to_pylist())
        assert rows_found == expected, f"stopped behind step {steps}"
    assert steps == 8, "the other batch and this one go into place, one after the other"


@pytest.mark.parametrize("stop", ["no", "before the replacement", "behind it"])
def test_faults_f7_a_batch_that_replaced_rows_is_never_taken_back(spark, tmp_path, monkeypatch, stop):
    """As where checkpoint and marks are older than the table: nobody else remembers what was replaced."""

    def rows(low, high, text):
        columns = "'t' as topic", "0 as partition", "id as `offset`", f"'{text}' as text"
        return spark.range(low, high, 1, 1).selectExpr(*columns)

    def sink(batch_id, query_id="q", **more):
        return told(idempotent_table(str(tmp_path / "table"), **more), batch_id, query_id)

    def found():
        held = spark.read.schema("`offset` long, text string").parquet(str(tmp_path / "table")).collect()
        return sorted((row["offset"], row["text"]) for row in held)

    for number in range(2):
        sink(number)(rows(number * 4, number * 4 + 4, "old"), number)
    rename, replacing = HadoopDirectory.rename, sink(2)

    def renamed(self, name, to):
        if to == "_pushrep/replacing" and stop == "before the replacement":
            raise KeyboardInterrupt
        result = rename(self, name, to)
        if to == "_pushrep/replacing" and stop == "behind it":
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(HadoopDirectory, "rename", renamed)
        with contextlib.nullcontext() if stop == "no" else pytest.raises(KeyboardInterrupt):
            replacing.replace(rows(6, 10, "new"), 2, [LogRange("t", 0, 6, 10)])
    if stop == "before the replacement":
        sink(1).drop_from(1)
        assert found() == [(n, "old") for n in range(4)], "it replaced nothing"
        sink(2)(rows(4, 8, "other"), 2)
        sink(2).drop_from(2)
        assert found() == [(n, "old") for n in range(4)], "nor did the one that has its number now"
        return
    sink(3)(rows(10, 12, "more"), 3)
    whole = [(n, "old" if n < 6 else "new" if n < 10 else "more") for n in range(12)]
    for first in (1, 2):
        with pytest.raises(
            CheckpointWentBack, match=r"batch 2 of table .* replaced rows, those of t-0 \[6, 10\) first: .*--adopt"
        ):
            sink(first).drop_from(first)
    with pytest.raises(CheckpointWentBack, match="batch 2 of table"):
        sink(2, "another", adopt=("q", 1))(rows(12, 13, "adopted"), 2)
    assert found() == whole, "nothing was taken back"
    sink(3).drop_from(3)
    assert found() == whole[:10]
    sink(3, "another", adopt=("q", 2))(rows(10, 11, "adopted"), 3)
    assert found() == [*whole[:10], (10, "adopted")]


def test_a_table_whose_rows_can_t_be_replaced_is_refused_by_name(spark, tmp_path):
    again = PartitionRows("t", 0, 6, 10, 4, 0, HighwaterMarks.from_columns([7], [0], [3], 0), 2, 2)
    paths = {kind: str(tmp_path / kind) for kind in ("json", "parquet")}
    told(idempotent_table(paths["parquet"]), 0)(spark.range(3), 0)
    refused = {
        "whole batches only": idempotent_table("orders"),
        "json doesn't give rows back": idempotent_table(paths["json"], "json"),
        "rows without topic, partition and offset": idempotent_table(paths["parquet"]),
    }
    for why, sink in refused.items():
        with pytest.raises(CantReplace, match=f"t-0 is read again from offset 6 on.*{why}.*--append-only"):
            Replacing(told(sink, 1), lambda *_: None).of_batch(spark, [again], FilterRule(), 1)
    there = SimpleNamespace(until=8, wanted=RowsWanted())
    with_window = RereadBatch(None, None, None, [again], FilterRule(window=4), 1, {("t", 0): there})
    with pytest.raises(CantReplace, match="with a window"):
        with_window.marks_before({MarksKey("t"): again.marks})


def test_a_place_that_an_earlier_repair_has_not_reached_is_refused(spark, tmp_path):
    """The job stood at 4, on its way through rows up to 10: its marks tell nothing of offset 6."""
    path = str(tmp_path / "table")
    sink = told(idempotent_table(path), 0)
    sink(spark.range(10).selectExpr("'t' as topic", "0 as partition", "id as `offset`"), 0)
    again = PartitionRows("t", 0, 6, 10, 4, 0, HighwaterMarks.from_columns([7], [0], [3], 0), 2, 2)

    def wanted(ranges):
        assert dict(ranges) == {LogRange("t", 0, 6, 10, 2): 2}
        return dict.fromkeys(ranges, RowsWanted(end=8, stood_at=4))

    replacing = Replacing(told(sink, 1), lambda *_: pytest.fail("nothing is read"), wanted)
    batch = replacing.of_batch(spark, [again], FilterRule(), 1)
    assert batch.ranges() == (LogRange("t", 0, 6, 8, 2),)
    with pytest.raises(CantReplace, match=r"stood at 4, below it.*go back to there, or further"):
        batch.marks_before({MarksKey("t"): again.marks})


def test_partition_columns_of_the_user(spark, tmp_path):
    for target in (str(tmp_path / "table"), "by_parity"):
        sink = told(idempotent_table(target, partition_by=["odd"]), 0)
        for _ in range(2):
            sink(spark.range(6).selectExpr("id", "id % 2 as odd"), 0)
        read = spark.read.parquet(target) if "/" in target else spark.table(target)
        assert sorted((r["id"], r["odd"], r["batch_id"]) for r in read.collect()) == [(i, i % 2, 0) for i in range(6)]
    assert (tmp_path / "table" / "batch_id=0" / "odd=1").is_dir()
    spark.sql("drop table by_parity")


def test_a_table_is_made_without_files_whose_rest_would_keep_it_from_being_made(spark, monkeypatch):
    rows = spark.sql("""select 7L as id, named_struct('a b', array(map('k', 1.5BD)), '`', 2) as `odd ``name`""")
    sink = told(idempotent_table("declared", options={"note": "it's a \\"}), 0)
    with monkeypatch.context() as killed:
        killed.setattr(DataFrame, "createOrReplaceTempView", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sink(rows, 0)
    warehouse = Path(urlsplit(spark.conf.get("spark.sql.warehouse.dir")).path)
    assert list((warehouse / "declared").iterdir()) == []
    assert spark.table("declared").schema.simpleString() == f"{rows.schema.simpleString()[:-1]},batch_id:bigint>"
    told(idempotent_table("declared"), 0)(rows, 0)
    assert spark.table("declared").drop("batch_id").collect() == rows.collect()
    spark.sql("drop table declared")


def test_data_of_others_is_left_alone(spark, tmp_path):
    path = tmp_path / "table"
    spark.range(3).write.parquet(str(path))
    with pytest.raises(TableNotOurs, match="did not write"):
        told(idempotent_table(str(path)), 0)(spark.range(1), 0)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(TableNotOurs, match="is a file"):
        told(idempotent_table(str(file)), 0)(spark.range(1), 0)
    spark.range(3).write.saveAsTable("theirs")
    with pytest.raises(TableNotOurs, match="no column batch_id"):
        told(idempotent_table("theirs"), 0)(spark.range(1), 0)
    spark.sql("drop table theirs")
    with pytest.raises(BadSink, match="name a catalog table"):
        idempotent_table(str(path), "hudi")


def test_the_record_of_queries_is_checked():
    owners = Owners((("a", 0), ("b", 18), ("c", 20)))
    assert (owners.queries, owners.first) == ((("a", 0), ("b", 18), ("c", 20)), 20)
    assert Owners.from_text(owners.to_text(), "t") == owners
    for bad in ("", "[]", "{}", json.dumps({"version": 2, "queries": []}), '{"version": 1, "queries": [1]}'):
        with pytest.raises(TableNotOurs, match="table t"):
            Owners.from_text(bad, "t")
