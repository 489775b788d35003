"""Topics whose producers write no metadata: the recipes of docs/spark.md over what such topics hold, judged by SQL.

debezium-postgresql.jsonl was recorded: Debezium 3.6.1 over PostgreSQL 15, transactions that overlap, a COPY, and a
connector that was killed and came back from an older position. The others are written here, shaped as their tools do.
"""

import ast
import json
import random
import re
import sqlite3
import zlib
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering import BadFilterSetting, PositionBits, StreamMetadata
from spark_jobs import FileMarks, ReplayFilteredBatches, SourcePosition, filter_frame, filter_replays
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import FrameUnusable

pytestmark = pytest.mark.spark

DOCS = Path(__file__).parents[3] / "docs" / "spark.md"
RECORDED = Path(__file__).parent / "recordings"
SCHEMA = "key binary, value binary, topic string, partition int, offset bigint"


def recipes():
    """Name → ((schema of `at`, which rows have a position), producer, position), out of the page's table."""
    cells = r"^\| ([^|]+) \| `([^|]+ [^|]+)` \| `([^|]+)` \| `([^|]+)` \| `([^|]+)` \|$"
    rows = re.findall(cells, DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: ((at, where), ast.literal_eval(one), ast.literal_eval(other)) for name, at, where, one, other in rows}


def postgresql():
    """(key, value, what names the record at its source)."""
    for line in (RECORDED / "debezium-postgresql.jsonl").read_text(encoding="utf-8").splitlines():
        key, value = json.loads(line)
        yield key, value, json.dumps([value["source"]["lsn"], value["after"] or value["before"]]) if value else None


def mysql(rng):
    """Transactions of some events of some rows each, over binlogs whose numbers gain a digit."""
    file, pos = 99, 4
    for number in range(30):
        if rng.random() < 0.2:
            file, pos = file + 1, 4
        for _ in range(rng.randint(1, 3)):
            pos += rng.randint(50, 400)
            for row in range(rng.randint(1, 4)):
                source = {"version": "3.6.1.Final", "connector": "mysql", "name": "shop", "ts_ms": number}
                source |= {"snapshot": "false", "db": "inventory", "sequence": None, "table": "orders"}
                source |= {"server_id": 223344, "gtid": None, "file": f"mysql-bin.{file:06}", "pos": pos}
                source |= {"row": row, "thread": 7, "query": None}
                after = {"id": rng.randrange(40), "item": f"{number}"}
                value = {"before": None, "after": after, "source": source, "op": "c", "transaction": None}
                yield {"id": after["id"]}, value, f"{source['file']} {pos} {row}"
        pos += 31


def hop(rng):
    """A topic of four partitions, copied by one process into another topic, partition by partition as it polls."""
    ends = [0] * 4
    for number in range(90):
        partition = rng.randrange(4)
        value = {"_topic": "orders", "_partition": partition, "_offset": ends[partition], "item": number}
        ends[partition] += rng.choice([1, 1, 1, 2])  # a transaction's marker has an offset, too
        yield {"partition": partition}, value, f"{partition} {value['_offset']}"


def lines(rng):
    """Lines of log files that are rotated: the path is one, the fingerprint is not."""
    for file in range(4):
        offset = 0
        for number in range(rng.randint(10, 25)):
            where = {"path": "/var/log/shop.log", "device_id": "64768", "inode": "1180", "fingerprint": f"{file:064x}"}
            value = {"message": f"line {number}", "log": {"offset": offset, "file": where}, "host": {"name": "shop-1"}}
            offset += rng.randint(20, 90)
            yield {"file": file}, value, f"{file} {value['log']['offset']}"


def attempts(records, rng):
    """Each record at least once: at times its shipper is killed, and continues from an older place."""
    records, at, sent = list(records), 0, []
    while at < len(records):
        end = min(len(records), at + rng.randint(5, 40))
        sent += records[at:end]
        at = end if end == len(records) else max(0, end - rng.randint(0, 30))
    return sent


LOGS = {
    "Debezium for PostgreSQL, with `provide.transaction.metadata=true`": postgresql,
    "Debezium for MySQL": lambda: attempts(mysql(random.Random(1)), random.Random(2)),
    "a second hop that writes where it read: Kafka's topic, partition, offset": (
        lambda: attempts(hop(random.Random(3)), random.Random(4))
    ),
    "lines of files, as Filebeat ships them": lambda: attempts(lines(random.Random(5)), random.Random(6)),
}


def topic_of(records, topic="changes", partitions=3):
    """Cells of SCHEMA, and what names each record: by key over the partitions, as Kafka Connect's producers do."""
    ends, rows, names = [0] * partitions, [], []
    for key, value, name in records:
        packed = json.dumps(key).encode()
        partition = zlib.crc32(packed) % partitions
        text = None if value is None else json.dumps(value).encode()
        rows.append((packed, text, topic, partition, ends[partition]))
        names.append(name)
        ends[partition] += 1
    return rows, names


def first_of_each(rows, names):
    """The expected result by SQL: the first copy of each source record in its partition, and all records without a
    position.
    """
    with sqlite3.connect(":memory:") as judge:
        judge.execute("create table log (partition, place, name)")
        named = [(*row[3:5], name) for row, name in zip(rows, names, strict=True)]
        judge.executemany("insert into log values (?, ?, ?)", named)
        nth = "select *, row_number() over (partition by partition, name order by place) nth from log"
        return set(judge.execute(f"select partition, place from ({nth}) where nth = 1 or name is null"))


def with_at(events, schema, where):
    at = F.from_json(F.col("value").cast("string"), schema)
    return events.withColumn("at", at).withColumn("at", F.expr(f"if({where}, at, null)"))


def places(frame):
    found = [tuple(row) for row in frame.select("partition", "offset").collect()]
    assert len(found) == len(set(found)), "a row came out twice"
    return set(found)


@pytest.mark.parametrize("name", LOGS)
def test_a_recipe_of_the_docs_keeps_what_sql_keeps(spark, tmp_path, name):
    at, producer, position = recipes()[name]
    rows, names = topic_of(LOGS[name]())
    expected = first_of_each(rows, names)
    assert len(expected) < len(rows), "some come again"
    carrier = SourcePosition(producer, position)
    result = filter_frame(with_at(spark.createDataFrame(rows, SCHEMA).coalesce(1), *at), carrier=carrier)
    assert places(result.rows) == expected
    # The other forms take the same column, so one recipe each.
    if "PostgreSQL" in name:
        assert by_stream(spark, tmp_path, rows, at, carrier, result.marks) == expected
    if "MySQL" in name:
        frame = with_at(spark.createDataFrame(rows, SCHEMA).coalesce(1), *at)
        assert places(filter_replays(frame, carrier=carrier)) == expected


def by_stream(spark, place, rows, at, carrier, marks_after):
    """The rows that the foreachBatch form keeps of two batches."""
    for n in range(2):
        part = rows[n * len(rows) // 2 : (n + 1) * len(rows) // 2]
        spark.createDataFrame(part, SCHEMA).coalesce(1).write.parquet(f"{place}/log/{n}")
    events, found = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(f"{place}/log/*"), []
    marks = FileMarks(place / "marks")
    once = ReplayFilteredBatches(lambda kept, _: found.append(places(kept)), marks, carrier=carrier)
    writer = with_at(events, *at).writeStream.foreachBatch(once)
    writer.option("checkpointLocation", f"{place}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    stored = marks.read(marks.owner(), 1).marks[MarksKey("changes")]
    assert dict(pairs_of(stored)) == dict(pairs_of(marks_after[MarksKey("changes")]))
    assert sum(map(len, found)) == len(set.union(*found))
    return set.union(*found)


def pairs_of(marks):
    return ((pair, entry.offset) for pair, entry in marks.items())


def test_the_first_transaction_behind_a_snapshot_may_come_twice(spark):
    """As docs say: before the connector has seen a commit it writes null, and after a restart another number."""
    at, producer, position = recipes()[next(name for name in LOGS if "PostgreSQL" in name)]
    recorded = list(postgresql())
    killed_early = [*recorded[:2], *recorded[9:]]
    assert [record[0] for record in killed_early[1:3]] == [{"id": 20}] * 2, "the same record"
    rows, names = topic_of(killed_early, partitions=1)
    frame = with_at(spark.createDataFrame(rows, SCHEMA).coalesce(1), *at)
    kept = places(filter_frame(frame, carrier=SourcePosition(producer, position)).rows)
    assert kept - first_of_each(rows, names) == {(0, 2)}


def test_mirrored_records_keep_what_tells_their_position(spark):
    """MirrorMaker: another topic, other offsets, the same partitions, keys and values; a task that began again."""
    at, producer, position = recipes()["Debezium for MySQL"]
    rows, names = topic_of(mysql(random.Random(8)))
    mirrored, again = [], []
    for partition in range(3):
        own = [(row, name) for row, name in zip(rows, names, strict=True) if row[3] == partition]
        twice = attempts(own, random.Random(partition))
        mirrored += [(*row[:2], "primary.changes", partition, n) for n, (row, _) in enumerate(twice)]
        again += [name for _, name in twice]
    frame = with_at(spark.createDataFrame(mirrored, SCHEMA).coalesce(1), *at)
    kept = places(filter_frame(frame, carrier=SourcePosition(producer, position)).rows)
    assert kept == first_of_each(mirrored, again)
    assert len(kept) == len(rows) < len(mirrored)
    # Metadata of ours come along in the key, and are filtered there as they are.
    keys = [StreamMetadata(7, row[3], names.index(name)).pack() for row, name in zip(mirrored, again, strict=True)]
    keyed = [(key, *row[1:]) for key, row in zip(keys, mirrored, strict=True)]
    assert places(filter_frame(spark.createDataFrame(keyed, SCHEMA).coalesce(1)).rows) == kept


def test_spark_packs_as_the_plain_form_does(spark):
    """So order is kept in Spark because it is in PositionBits (tests/properties/test_positions.py)."""
    rng, most = random.Random(7), (2**9 - 1, 2**40 - 1, 2**14 - 1)
    parts = [(0, 0, 0), most, *(tuple(rng.randint(0, rng.choice([1, end])) for end in most) for _ in range(200))]
    rows = [(4711, a, Decimal(b), c, "t", 3, n) for n, (a, b, c) in enumerate(parts)]
    names = "pid bigint, a int, b decimal(20, 0), c bigint, topic string, partition int, offset bigint"
    frame = spark.createDataFrame(rows, names)
    packed = frame.select(SourcePosition("pid", {"a": 9, "b": 40, "c": 14}).key(frame).alias("key"), "offset")
    assert {row.offset: bytes(row.key) for row in packed.collect()} == {
        n: StreamMetadata(4711, 3, PositionBits(9, 40, 14).pack(*own)).pack() for n, own in enumerate(parts)
    }


@pytest.mark.parametrize(
    ("expression", "kind", "why"),
    [
        ("'mysql-bin.000003'", "string", "text is ordered as text"),
        ("current_timestamp()", "timestamp", "one instant"),
        ("cast(1 as double)", "double", "rounded"),
        ("cast(1 as decimal(9, 2))", "decimal", "whole numbers"),
        ("array(1, 2)", "array", "whole numbers"),
        ("true", "boolean", "whole numbers"),
        ("X'00'", "binary", "whole numbers"),
    ],
)
def test_what_has_no_order_is_refused_by_name(spark, expression, kind, why):
    frame = spark.range(1).selectExpr("'t' topic", "0 partition", "id offset")
    with pytest.raises(FrameUnusable, match=rf"{re.escape(repr(expression))} is {kind}.*: .*{why}"):
        filter_frame(frame, carrier=SourcePosition("'p'", {"offset": 20, expression: 10}))
    with pytest.raises(FrameUnusable, match="a producer is a whole number or text"):
        filter_frame(frame, carrier=SourcePosition("cast(1 as double)", "offset"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("'p', 0L, 8L, 5L", r"b is not in \[0, 2\^3\): 8"),
        ("'p', 0L, -1L, 5L", r"b is not in \[0, 2\^3\): -1"),
        ("'p', 0L, cast(null as bigint), 5L", "b is null beside other parts"),
        ("cast(null as string), 0L, 1L, 5L", "p is null beside other parts"),
        ("'p', cast(null as bigint), 1L, 5L", "s is null beside other parts"),
        ("'p', -1L, 1L, 5L", "source partition -1"),
    ],
)
def test_a_row_without_a_whole_position_fails_and_is_named(spark, row, said):
    frame = spark.sql(f"select *, 't' topic, 0 partition, 0L offset from values ({row}) as t(p, s, b, a)")
    with pytest.raises(PySparkException, match=said):
        filter_frame(frame, carrier=SourcePosition("p", {"a": 40, "b": 3}, "s")).rows.collect()


def test_a_row_without_any_position_passes_and_is_counted_as_unkeyed(spark):
    at = [(None, None), ("p", 5), (None, None), ("p", 5), ("p", None)]
    rows = [(*own, "t", 0, n) for n, own in enumerate(at)]
    frame = spark.createDataFrame(rows, "p string, n bigint, topic string, partition int, offset bigint").coalesce(1)
    result = filter_frame(frame, carrier=SourcePosition("p", "n"))
    assert {offset for _, offset in places(result.rows)} == {0, 1, 2, 4}
    assert (result.counts().unkeyed, result.counts().dropped) == (3, 1)


def test_gaps_are_counted_where_a_position_is_one_number_and_chance_is_never_suspected(spark):
    rows = [("p", n, 2**61 + n, "t", 0, n) for n in (1, 2, 5)]
    frame = spark.createDataFrame(rows, "p string, n bigint, far bigint, topic string, partition int, offset bigint")
    frame = frame.coalesce(1)
    one = filter_frame(frame, carrier=SourcePosition("p", "far")).counts()
    assert (one.jumped, one.unlikely_pairs) == (2, 0)
    assert filter_frame(frame, carrier=SourcePosition("p", {"n": 31, "offset": 32})).counts().jumped == 0
    with pytest.raises(BadFilterSetting, match="window"):
        filter_frame(frame, carrier=SourcePosition("p", {"n": 31, "offset": 32}), window=3)
    with pytest.raises(BadFilterSetting, match="63 in all"):
        SourcePosition("p", {"n": 32, "offset": 32})
    with pytest.raises(BadFilterSetting, match="several with their bits"):
        SourcePosition(producer="name", position=["place", "nth"])
    with pytest.raises(BadFilterSetting, match="producer"):
        SourcePosition([], "n")
