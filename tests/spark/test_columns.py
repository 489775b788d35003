"""The column expressions give the same results as `StreamMetadata`, row by row; many rows in one frame, not a job for
each.
"""

import random
import struct

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from filtering.errors import BadFilterSetting
from filtering.stream_metadata import METADATA_HEADER, StreamMetadata
from spark_jobs import carrier_key, stream_metadata_columns, with_stream_metadata
from spark_jobs.columns import pack_stream_metadata
from spark_jobs.errors import FrameUnusable

pytestmark = pytest.mark.spark

EDGES_64 = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1]
EDGES_32 = [-(2**31), -1, 0, 1, 2**31 - 1]


def any_key(rng: random.Random) -> bytes | None:
    """Mostly 20 bytes, with fields at their edges; also other lengths and nothing."""
    kind = rng.randrange(10)
    if kind == 0:
        return None
    if kind == 1:
        return rng.randbytes(rng.choice([0, 1, 8, 19, 21, 40]))
    if kind == 2:
        return rng.randbytes(20)
    pid = rng.choice([*EDGES_64, rng.getrandbits(64) - 2**63])
    partition = rng.choice([*EDGES_32, rng.getrandbits(31)])
    offset = rng.choice([*EDGES_64, rng.getrandbits(63)])
    return struct.pack(">qiq", pid, partition, offset)


def test_the_expressions_agree_with_stream_metadata(spark):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    keys = [any_key(rng) for _ in range(3000)]
    rows = (
        spark.createDataFrame([(key,) for key in keys], "key binary")
        .select("key", *stream_metadata_columns())
        .withColumn("again", pack_stream_metadata(F.col("pid"), F.col("source_partition"), F.col("source_offset")))
    )
    assert dict(rows.dtypes)["pid"] == "bigint"
    assert dict(rows.dtypes)["source_partition"] == "int"
    assert dict(rows.dtypes)["source_offset"] == "bigint"
    seen = {True: 0, False: 0}
    for row in rows.collect():
        expected = StreamMetadata.try_unpack(row.key)
        seen[expected is not None] += 1
        got = None if row.pid is None else StreamMetadata(row.pid, row.source_partition, row.source_offset)
        assert got == expected, f"seed {seed}: key {row.key!r}"
        assert row.again == (None if expected is None else row.key), f"seed {seed}: packed again, key {row.key!r}"
        assert (row.source_partition is None) == (row.source_offset is None) == (expected is None), f"seed {seed}"
    assert min(seen.values()) > 100, f"seed {seed}: both kinds were tried, {seen}"


def test_the_published_vector(spark):
    row = (
        with_stream_metadata(
            spark.range(1).select(F.lit(1).alias("source_partition"), F.lit(0).alias("source_offset")),
            -7334467018974291969,
        )
        .select("key")
        .first()
    )
    assert row.key.hex() == "9a36bd1b1d3817ff000000010000000000000000"


def test_both_carriers_hand_back_what_was_packed(spark):
    source = spark.range(5).select(
        F.col("id").cast("int").alias("partition"), (F.col("id") * 1000).alias("offset"), F.col("id").alias("pid")
    )
    by_key = with_stream_metadata(source, F.col("pid"), "partition", "offset")
    by_header = with_stream_metadata(source, F.col("pid"), "partition", "offset", carrier="header")
    expected = [StreamMetadata(n, n, n * 1000).pack() for n in range(5)]
    both = by_key.select("pid", carrier_key("key", by_key).alias("packed")).union(
        by_header.select("pid", carrier_key("header", by_header).alias("packed"))
    )
    assert sorted((row.pid, row.packed) for row in both.collect()) == sorted(list(enumerate(expected)) * 2)


def test_the_header_replaces_older_ones_and_the_last_counts(spark):
    old, older = StreamMetadata(1, 1, 1).pack(), StreamMetadata(2, 2, 2).pack()
    frame = spark.createDataFrame(
        [
            (0, None),
            (1, []),
            (2, [("other", b"x")]),
            (3, [(METADATA_HEADER, older), ("other", None), (METADATA_HEADER, old), (None, b"nameless")]),
            (4, [(METADATA_HEADER, older), ("other", None), (METADATA_HEADER, old)]),
            (5, [(METADATA_HEADER, old), (METADATA_HEADER, None)]),
        ],
        "n int, headers array<struct<key: string, value: binary>>",
    )
    last = dict(frame.select("n", carrier_key("header", frame)).collect())
    assert last == {0: None, 1: None, 2: None, 3: old, 4: old, 5: None}
    stamped = with_stream_metadata(frame, 7, F.lit(1), F.col("n"), carrier="header")
    new = [StreamMetadata(7, 1, n).pack() for n in range(6)]
    assert {row.n: [tuple(header) for header in row.headers] for row in stamped.select("n", "headers").collect()} == {
        0: [(METADATA_HEADER, new[0])],
        1: [(METADATA_HEADER, new[1])],
        2: [("other", b"x"), (METADATA_HEADER, new[2])],
        3: [("other", None), (None, b"nameless"), (METADATA_HEADER, new[3])],
        4: [("other", None), (METADATA_HEADER, new[4])],
        5: [(METADATA_HEADER, new[5])],
    }


@pytest.mark.parametrize(
    ("partition", "offset", "named"),
    [(-1, 0, "source partition -1"), (2**31, 0, "source partition 2147483648"), (0, -1, "source offset -1")],
)
def test_a_part_out_of_range_fails_by_name(spark, partition, offset, named):
    frame = with_stream_metadata(spark.range(1), 7, F.lit(partition), F.lit(offset))
    with pytest.raises(PySparkException, match=named):
        frame.collect()


def test_a_business_key_is_not_overwritten_but_metadata_is(spark):
    relayed = spark.createDataFrame([(StreamMetadata(1, 2, 3).pack(),), (None,)], "key binary")
    packed = with_stream_metadata(relayed, 7, F.lit(0), F.lit(5)).select("key").collect()
    assert [row.key for row in packed] == [StreamMetadata(7, 0, 5).pack()] * 2
    business = spark.createDataFrame([(b"customer-1",)], "key binary")
    with pytest.raises(PySparkException, match="business key"):
        with_stream_metadata(business, 7, F.lit(0), F.lit(5)).collect()


@pytest.mark.parametrize(
    ("carrier", "columns", "named"),
    [
        ("header", "key binary", "includeHeaders"),
        ("key", "value binary", "'key'"),
        ("key", "key string", "'key' is string"),
    ],
)
def test_an_unusable_carrier_is_refused_by_name(spark, carrier, columns, named):
    frame = spark.createDataFrame([], columns)
    with pytest.raises(FrameUnusable, match=f"carrier '{carrier}': .*{named}"):
        carrier_key(carrier, frame)


def test_an_unknown_carrier_is_refused(spark):
    with pytest.raises(BadFilterSetting, match="tail"):
        carrier_key("tail", spark.range(1))
    with pytest.raises(BadFilterSetting, match="tail"):
        with_stream_metadata(spark.range(1), 7, F.lit(0), F.lit(0), carrier="tail")
