"""Values that are Avro without a container, as columns: fastavro inside `mapInArrow`, one Arrow batch at a time.

    value: binary  ─▶  one column per field of the schema; a union with null is a nullable column

Spark's own `from_avro` lives in a jar that pip doesn't bring. Flat records only: a field is a primitive, or one of the
logical types below, or a union of one of these with null.
"""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 - Spark's own habit
from pyspark.sql.pandas.types import to_arrow_schema

from spark_jobs.errors import SparkJobError

_TYPES: Final[dict[str, T.DataType]] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "bytes": T.BinaryType(),
    "string": T.StringType(),
    "date": T.DateType(),
    "timestamp-millis": T.TimestampType(),
    "timestamp-micros": T.TimestampType(),
}


class SchemaUnusable(SparkJobError):
    """The Avro schema has something that doesn't become a column; `field` names it."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"avro schema: {field}: {why}")
        self.field = field


def spark_schema(schema: dict[str, Any]) -> T.StructType:
    """The columns of a record schema. Raises SchemaUnusable."""
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise SchemaUnusable("type", "expected a record")
    return T.StructType([_column(field["name"], field["type"]) for field in schema["fields"]])


def _column(name: str, kind: Any) -> T.StructField:
    others = [k for k in kind if k != "null"] if isinstance(kind, list) else [kind]
    if len(others) != 1:
        raise SchemaUnusable(name, "a union becomes a column only with null and one other type")
    only = others[0]
    named = only.get("logicalType", only.get("type")) if isinstance(only, dict) else only
    if not isinstance(named, str) or named not in _TYPES:
        raise SchemaUnusable(name, f"{named!r} becomes no column; use one of {', '.join(_TYPES)}")
    return T.StructField(name, _TYPES[named], nullable=isinstance(kind, list))


def avro_columns(rows: DataFrame, schema_json: str, value: str = "value") -> DataFrame:
    """The column `value` decoded; other columns are left behind. Raises SchemaUnusable.

    A value that isn't this schema's fails the query: a record that can't be read must not vanish from a table.
    """
    try:
        schema = json.loads(schema_json)
    except ValueError as error:
        raise SchemaUnusable("the file", f"isn't JSON ({error})") from error
    columns = spark_schema(schema)
    return rows.select(value).mapInArrow(_decoder(schema, to_arrow_schema(columns, timezone="UTC")), columns)


def _decoder(
    schema: dict[str, Any], columns: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What runs in Spark's Python workers; carries plain values only."""

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parsed = parse_schema(schema)
        for batch in batches:
            values: list[Any] = batch.column(0).to_pylist()
            if None in values:
                raise ValueError("a record has no value: null is no Avro")
            records: list[Any] = [schemaless_reader(io.BytesIO(value), parsed, None) for value in values]
            yield pa.RecordBatch.from_pylist(records, schema=columns)

    return decode
