"""What a record's value holds, as columns beside the record's own: binary, string, json or Avro.

    binary   value                     as it came
    string   value                     UTF-8
    json     one column a field        Spark's from_json with a schema in Spark's DDL, or its own JSON form
    avro     one column a field        one datum without a container, by fastavro (Spark's from_avro needs a jar)

Avro becomes columns so: null in a union makes nullable, a union with one other type is that type; enum is string,
fixed is binary; date, timestamp-*, decimal as Spark has them. Wider unions are refused: no column holds them.
A value of Avro that can't be decoded fails the query, which names the record; so does a null. JSON that can't be parsed
fails the query with the text, by Spark's FAILFAST mode. As from_json has it, null and blank text give nulls, and text
behind the first JSON value is ignored.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql import types as T  # noqa: N812 - Spark's own habit

from pushrep.env.checked_json import parse_json
from spark_jobs.errors import BadJobOption, RecordUnfit
from spark_jobs.spark_internals import arrow_schema, map_in_arrow, quoted

DEFAULT_KEEP = ("topic", "partition", "offset", "timestamp")

_PRIMITIVES: Mapping[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "bytes": T.BinaryType(),
    "string": T.StringType(),
    "fixed": T.BinaryType(),
    "enum": T.StringType(),
}
_LOGICAL: Mapping[str, T.DataType] = {
    "date": T.DateType(),
    "timestamp-millis": T.TimestampType(),
    "timestamp-micros": T.TimestampType(),
    "local-timestamp-millis": T.TimestampNTZType(),
    "local-timestamp-micros": T.TimestampNTZType(),
    "uuid": T.StringType(),
}


@dataclass(frozen=True, slots=True)
class ValueDecoder:
    """Turns frames of records into frames of columns; `keep` are the record's own columns that stay beside them.

    `format` is binary, string, json or avro; `schema` is the text of the schema for json and avro. Raises BadJobOption.
    """

    format: str = "binary"
    schema: str | None = None
    keep: tuple[str, ...] = DEFAULT_KEEP

    def __post_init__(self) -> None:
        if (self.schema is None) != (self.format in ("binary", "string")):
            given = "takes no schema" if self.schema is not None else "needs a schema"
            raise BadJobOption("--value-schema", None, f"format {self.format} {given}")
        if twice := sorted({name for name in self.keep if self.keep.count(name) > 1}):
            raise BadJobOption("--keep", None, f"{', '.join(twice)} is named twice")

    def __call__(self, rows: DataFrame) -> DataFrame:
        """The value's columns, then those of `keep`."""
        if self.format == "avro":
            return self._decode_avro(rows)
        keep = [*map(quoted, self.keep)]
        if self.format == "json":
            schema = self._value_columns()
            # FAILFAST, and it fails the query: PERMISSIVE would turn a broken value into a row of nulls.
            parsed = F.from_json(F.col("value").cast("string"), schema, {"mode": "FAILFAST"})
            return rows.select(parsed.alias("_value"), *keep).select("_value.*", *keep)
        value = F.col("value") if self.format == "binary" else F.col("value").cast("string").alias("value")
        return rows.select(value, *keep)

    def columns(self, record: T.StructType) -> T.StructType:
        """What comes of frames with the columns `record`. Raises BadJobOption for what no such frame can give."""
        value = self._value_columns()
        own = {name.lower() for name in value.names}  # Spark and Parquet take a and A for one column
        if clash := sorted(name for name in self.keep if name.lower() in own):
            raise BadJobOption("--keep", None, f"{', '.join(clash)} is also a column of the value: leave it out")
        if lacking := [name for name in self.keep if name not in record.names]:
            why = f"records have no column {lacking[0]!r}, only {', '.join(record.names)}"
            raise BadJobOption("--keep", None, why)
        return T.StructType([*value.fields, *(record[name] for name in self.keep)])

    def _value_columns(self) -> T.StructType:
        if self.format == "avro":
            return spark_schema(self._avro_schema())
        if self.format == "json":
            return self._json_schema()
        return T.StructType([T.StructField("value", T.BinaryType() if self.format == "binary" else T.StringType())])

    def _avro_schema(self) -> Any:
        try:
            return parse_json(self.schema or "")
        except ValueError as error:
            raise BadJobOption("--value-schema", None, f"is no JSON ({error})") from error

    def _json_schema(self) -> T.StructType:
        text = (self.schema or "").strip()
        try:
            if text.startswith("{"):
                return T.StructType.fromJson(parse_json(text))
            schema = T.StructType.fromDDL(text)
        except Exception as error:  # parser errors of Spark have no common root with the JSON ones
            raise BadJobOption(
                "--value-schema", None, f"is no schema of Spark ({str(error).splitlines()[0]})"
            ) from error
        if not isinstance(schema, T.StructType):
            raise BadJobOption("--value-schema", None, f"names one type, {schema.simpleString()}, and no columns")
        return schema

    def _decode_avro(self, rows: DataFrame) -> DataFrame:
        schema = self._avro_schema()
        fields = spark_schema(schema)
        kept = [rows.schema[name] for name in self.keep]
        columns = T.StructType([*fields.fields, *kept])
        places = [name for name in ("topic", "partition", "offset") if name in rows.columns]
        wanted = rows.select(
            F.col("value").alias("_value"), *(F.col(n).alias(f"_{n}") for n in places), *map(quoted, self.keep)
        )
        decode = avro_decoder(schema, arrow_schema(fields), self.keep)
        return map_in_arrow(wanted, decode, columns)


def spark_schema(schema: Any) -> T.StructType:
    """The columns of an Avro record schema, given as parsed JSON. Raises BadJobOption."""
    try:
        parsed: Any = fastavro.parse_schema(schema)  # names become full names, wherever they stand
        if not isinstance(parsed, dict) or parsed["type"] != "record":
            raise BadJobOption("--value-schema", None, "an Avro record is expected, whose fields become columns")
        struct = _type_of(parsed, {}, "the record")
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, TypeError, KeyError) as error:
        raise BadJobOption("--value-schema", None, f"is no Avro schema ({error!r})") from error
    assert isinstance(struct, T.StructType), "a record becomes a struct"
    return struct


def avro_decoder(
    schema: Any, fields: Any, keep: Sequence[str]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For mapInArrow over (_value, _topic, _partition, _offset, *keep): `fields` (an Arrow schema), then `keep`."""

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parsed = fastavro.parse_schema(schema)
        for batch in batches:
            records: list[Any] = []
            for number, value in enumerate(batch.column("_value").to_pylist()):
                try:
                    records.append(_datum(value, parsed))
                except Exception as error:  # whatever a broken value makes fastavro raise
                    raise RecordUnfit(f"the value of {_where(batch, number)} can't be decoded: {error!r}") from error
            decoded = pa.RecordBatch.from_pylist(records, schema=fields)
            kept = [batch.column(name) for name in keep]
            names = [*decoded.schema.names, *keep]
            yield pa.RecordBatch.from_arrays([*decoded.columns, *kept], names=names)

    return decode


def _datum(value: bytes | None, parsed: Any) -> Any:
    if value is None:
        raise ValueError("null is no Avro")
    stream = io.BytesIO(value)
    record = fastavro.schemaless_reader(stream, parsed, None)
    if rest := len(value) - stream.tell():
        raise ValueError(f"{rest} bytes are left over")
    return record


def _where(batch: pa.RecordBatch, row: int) -> str:
    names = [name for name in ("topic", "partition", "offset") if f"_{name}" in batch.schema.names]
    return ", ".join(f"{name} {batch.column(f'_{name}')[row]}" for name in names) or f"row {row}"


def _type_of(kind: Any, named: dict[str, T.DataType], where: str) -> T.DataType:
    """An Avro type → Spark's; `named` are the named types met so far."""
    if isinstance(kind, str):
        if kind in named:
            return named[kind]
        if kind not in _PRIMITIVES:
            raise BadJobOption("--value-schema", None, f"{where}: {kind!r} becomes no column")
        return _PRIMITIVES[kind]
    if isinstance(kind, list):
        others = [k for k in kind if k != "null"]
        if len(others) != 1:
            raise BadJobOption(
                "--value-schema", None, f"{where}: a union becomes a column only as null and one other type"
            )
        return _type_of(others[0], named, where)
    found = _complex_type(kind, named, where)
    if "name" in kind:
        named[kind["name"]] = found
    return found


def _complex_type(kind: Any, named: dict[str, T.DataType], where: str) -> T.DataType:
    base, logical = kind["type"], kind.get("logicalType")
    if not (kind["fields"] if base == "record" else kind.get("size", 1)):
        # Nothing in a value's bytes would bound how many of it an array of ten bytes holds.
        raise BadJobOption("--value-schema", None, f"{where}: a {base} of no bytes becomes no column")
    if logical == "decimal":
        return T.DecimalType(kind["precision"], kind.get("scale", 0))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if base == "record":
        return T.StructType(
            [
                T.StructField(
                    f["name"], _type_of(f["type"], named, f"{where}, field {f['name']}"), _nullable(f["type"])
                )
                for f in kind["fields"]
            ]
        )
    if base == "array":
        return T.ArrayType(_type_of(kind["items"], named, where), _nullable(kind["items"]))
    if base == "map":
        return T.MapType(T.StringType(), _type_of(kind["values"], named, where), _nullable(kind["values"]))
    return _type_of(base, named, where)


def _nullable(kind: Any) -> bool:
    return isinstance(kind, list) and "null" in kind
