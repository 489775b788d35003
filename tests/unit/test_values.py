"""Values into columns, the part that runs in a worker: Avro schemas to types, data to Arrow, refusals by name."""

import decimal
import io
import json
from datetime import UTC, date, datetime

import fastavro
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import types as T  # noqa: N812 - Spark's own habit

from spark_jobs.errors import BadJobOption, RecordUnfit
from spark_jobs.values import DEFAULT_KEEP, ValueDecoder, avro_decoder, spark_schema

EVERYTHING = {
    "type": "record",
    "name": "Everything",
    "namespace": "test",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "large", "type": ["null", "long"]},
        {"name": "single", "type": "float"},
        {"name": "double", "type": ["double", "null"]},
        {"name": "text", "type": ["null", "string"]},
        {"name": "raw", "type": "bytes"},
        {"name": "four", "type": {"type": "fixed", "name": "Four", "size": 4}},
        {"name": "suit", "type": {"type": "enum", "name": "Suit", "symbols": ["HEARTS", "SPADES"]}},
        {"name": "again", "type": "Suit"},
        {"name": "by_full_name", "type": ["null", "test.Suit"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "wall", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "list", "type": {"type": "array", "items": ["null", "int"]}},
        {"name": "map", "type": {"type": "map", "values": "string"}},
        {
            "name": "inner",
            "type": ["null", {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "int"}]}],
        },
    ],
}
DATUM = {
    "flag": True,
    "small": -1,
    "large": 2**40,
    "single": 1.5,
    "double": None,
    "text": "é",
    "raw": b"\0\xff",
    "four": b"abcd",
    "suit": "SPADES",
    "again": "HEARTS",
    "by_full_name": None,
    "day": date(2013, 1, 1),
    "at": datetime(2013, 1, 1, 5, 15, tzinfo=UTC),
    "wall": datetime(2013, 1, 1, 5, 15, 0, 7),  # noqa: DTZ001 - a wall clock has no zone
    "price": decimal.Decimal("12.34"),
    "list": [1, None, 3],
    "map": {"a": "b"},
    "inner": {"x": 5},
}


def encoded(schema, datum):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), datum)
    return out.getvalue()


def decoded(schema, values, *, places=True):
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = {"_value": pa.array(values, pa.binary())}
    if places:
        count = len(values)
        columns |= {"_topic": pa.array(["t"] * count), "_partition": [3] * count, "_offset": list(range(count))}
    columns["offset"] = pa.array(range(len(values)), pa.int64())
    fields = to_arrow_schema(spark_schema(schema), timezone="UTC")
    decode = avro_decoder(schema, fields, ("offset",))
    (batch,) = decode([pa.RecordBatch.from_pydict(columns)])
    return batch


def test_every_type_becomes_its_column():
    assert spark_schema(EVERYTHING).simpleString() == (
        "struct<flag:boolean,small:int,large:bigint,single:float,double:double,text:string,raw:binary,four:binary,"
        "suit:string,again:string,by_full_name:string,day:date,at:timestamp,wall:timestamp_ntz,price:decimal(9,2),"
        "list:array<int>,map:map<string,string>,inner:struct<x:int>>"
    )
    nullable = {field.name for field in spark_schema(EVERYTHING).fields if field.nullable}
    assert nullable == {"large", "double", "text", "by_full_name", "inner"}
    batch = decoded(EVERYTHING, [encoded(EVERYTHING, DATUM)])
    (row,) = batch.to_pylist()
    assert row == {**DATUM, "map": [("a", "b")], "offset": 0}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "null is no Avro"),
        (b"", "EOF"),
        (encoded(EVERYTHING, DATUM)[:-1], ""),
        (encoded(EVERYTHING, DATUM) + b"\0", "1 bytes are left over"),
    ],
)
def test_a_value_that_is_not_the_schema_s_names_its_record(value, why):
    with pytest.raises(RecordUnfit, match="topic t, partition 3, offset 1") as refused:
        decoded(EVERYTHING, [encoded(EVERYTHING, DATUM), value])
    assert why in str(refused.value)
    with pytest.raises(RecordUnfit, match="row 0"):
        decoded(EVERYTHING, [value], places=False)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("long", "an Avro record is expected"),
        ({"type": "record", "fields": []}, "is no Avro schema"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "colour"}]}, "is no Avro schema"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "string"]}]}, "field a: a union"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "null"}]}, "field a: 'null'"),
        *(
            (
                {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": empty}}]},
                "no bytes",
            )
            for empty in ({"type": "record", "name": "E", "fields": []}, {"type": "fixed", "name": "F", "size": 0})
        ),
    ],
)
def test_schemas_that_give_no_columns_are_refused(schema, why):
    with pytest.raises(BadJobOption, match=why):
        spark_schema(schema)


RECORD = T.StructType([T.StructField(name, T.StringType()) for name in (*DEFAULT_KEEP, "day")])


def test_settings_are_checked_before_spark_starts():
    ValueDecoder("avro", json.dumps(EVERYTHING))
    for wrong, option in (
        ({"format": "avro"}, "value-schema"),
        ({"format": "binary", "schema": "{}"}, "value-schema"),
        ({"format": "avro", "schema": "{"}, "value-schema"),
        ({"format": "avro", "schema": json.dumps(EVERYTHING), "keep": ("day",)}, "keep"),
    ):
        with pytest.raises(BadJobOption) as refused:
            ValueDecoder(**wrong).columns(RECORD)
        assert refused.value.option == f"--{option}"
