"""Where a row's record first lived, as built-in column expressions: no Python runs for a row.

    byte   0        8        12       20     big-endian, signed; Spark's substring counts from 1
          | pid     | part.  | offset |

Metadata or not is decided as `filtering.StreamMetadata` decides: 20 bytes, and neither partition nor offset negative,
that is, bytes 8 and 12 below 0x80. Anything else gives null in all three columns.

Spark has no cast from binary to a number under ANSI rules, so bytes go through hexadecimal: `conv(hex(b), 16, -10)`
reads 16 digits as two's complement (a negative target base means signed), and `hex` of a long writes two's complement.

For topics whose producers write no 20 bytes, SQL expressions over the row's columns give them:

    SourcePosition(producer="source.name", position={"binlog": 19, "source.pos": 32, "source.row": 12})

    pid = the producer's number, or xxhash64 of its text · source partition = the row's partition · packed position

They are a column of the filter's own, so the row's key does not change. The source partition is by default the row's
own log partition: a source that is spread over a topic's partitions by key, as Debezium does, keeps its order in each
of them. So each has a mark of its own, and no pair is split.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
)

from filtering.errors import BadFilterSetting
from filtering.marks import HighwaterMarks, check_window
from filtering.replay_filter import ReplayFilter, check_ttl, checked_pids
from filtering.stream_metadata import (
    KEY_BYTES,
    METADATA_HEADER,
    OFFSET_MAX,
    PARTITION_MAX,
    POSITION_BITS,
    PositionBits,
)
from spark_jobs.errors import FrameUnusable
from spark_jobs.spark_internals import Numbers, by_prefix, over_connect

assert KEY_BYTES == 20, "the substrings below are cut for 20 bytes"

CARRIERS = ("key", "header")

_HEADERS_TYPE = "array<struct<key: string, value: binary>>"
_Made = TypeVar("_Made")


class MetadataColumns(NamedTuple):
    """Three columns, each null where the key is not metadata; unpack them into a select: `df.select("*", *columns)`."""

    pid: Column
    source_partition: Column
    source_offset: Column


def stream_metadata_columns(key: Column | str = "key") -> MetadataColumns:
    """Take a 20-byte key apart: `pid` bigint, `source_partition` int, `source_offset` bigint, so named.

    `key` is a binary column or its name; for the header carrier pass `carrier_key("header")`.
    """
    column = F.col(key) if isinstance(key, str) else key
    is_metadata = is_stream_metadata(column)
    partition = number_by_digits(column, 9, 4).bitwiseAND(F.lit(PARTITION_MAX)).cast("int")
    return MetadataColumns(
        pid=F.when(is_metadata, number_by_digits(column, 1, 8)).alias("pid"),
        source_partition=F.when(is_metadata, partition).alias("source_partition"),
        source_offset=F.when(is_metadata, number_by_digits(column, 13, 8)).alias("source_offset"),
    )


def is_stream_metadata(key: Column) -> Column:
    """Whether a binary column holds metadata: true or false, never null."""
    sign_bit = F.lit(b"\x80")  # binary compares byte by byte, unsigned
    fits = (
        (F.octet_length(key) == KEY_BYTES) & (F.substring(key, 9, 1) < sign_bit) & (F.substring(key, 13, 1) < sign_bit)
    )
    return F.coalesce(fits, F.lit(False))


def pack_stream_metadata(pid: Column, partition: Column, offset: Column) -> Column:
    """The 20 bytes of one key; null if a part is null. A part out of its range fails the query and names it."""
    pid, partition, offset = pid.cast("bigint"), partition.cast("bigint"), offset.cast("bigint")
    packed = F.concat(_bytes(pid, 8), _bytes(partition, 4), _bytes(offset, 8))
    return (
        F.when((partition < 0) | (partition > PARTITION_MAX), _refuse("source partition", partition, PARTITION_MAX))
        .when(offset < 0, _refuse("source offset", offset, OFFSET_MAX))
        .otherwise(packed)
    )


def carrier_key(carrier: str, df: DataFrame) -> Column:
    """The bytes that may be metadata, by carrier: the key column, or the last header named `stream-metadata`.

    Raises FrameUnusable if the frame lacks the column, or has a key that is no bytes; the sources give headers with
    `includeHeaders`. BadFilterSetting for an unknown carrier.
    """
    _check_carrier(carrier)
    column = "key" if carrier == "key" else "headers"
    if column not in df.columns:
        hint = "read with option includeHeaders=true" if carrier == "header" else "select it"
        raise FrameUnusable(f"carrier {carrier!r}: the frame has no column {column!r}: {hint}")
    if carrier == "key":
        kind = df.schema["key"].dataType
        if not isinstance(kind, BinaryType | NullType):
            why = f"the column {column!r} is {kind.simpleString()}, and metadata are 20 bytes: leave it binary"
            raise FrameUnusable(f"carrier {carrier!r}: {why}")
        return F.col("key")
    headers, last = F.col("headers"), F.lit(-1)
    named = F.filter(headers, lambda header: header["key"] == METADATA_HEADER)
    # try_element_at answers null where the array is empty or null; -1 is the last. Ours is the last of all, unless
    # somebody between us appended one: then only is the slow search begun, which Spark does not compile.
    newest = F.try_element_at(headers, last)
    found = F.try_element_at(named, last)["value"]
    return F.when(newest["key"] == METADATA_HEADER, newest["value"]).otherwise(found)


def with_stream_metadata(
    df: DataFrame,
    pid: Column | int,
    partition: Column | str = "source_partition",
    offset: Column | str = "source_offset",
    *,
    carrier: str = "key",
) -> DataFrame:
    """Give each row the metadata of its source position, ready for a sink to Kafka or a log.

    `pid` is a number (`filtering.producer_id`) or a column, `partition` and `offset` the row's source position.
    Carrier `key` sets the column `key`; a row whose key is neither null nor metadata is a business key and fails the
    query: drop the column first, or use carrier `header`, which appends to `headers` (made if absent) the header
    `stream-metadata` and removes older ones of that name. Raises BadFilterSetting for an unknown carrier.
    """
    _check_carrier(carrier)
    packed = pack_stream_metadata(F.lit(pid) if isinstance(pid, int) else pid, _column(partition), _column(offset))
    if carrier == "key":
        return df.withColumn("key", _unless_business_key(packed) if "key" in df.columns else packed)
    header = F.array(F.struct(F.lit(METADATA_HEADER).alias("key"), packed.alias("value"))).cast(_HEADERS_TYPE)
    if "headers" not in df.columns:
        return df.withColumn("headers", header)
    older = F.coalesce(F.col("headers").cast(_HEADERS_TYPE), F.array().cast(_HEADERS_TYPE))
    others = F.filter(older, lambda old: ~old["key"].eqNullSafe(METADATA_HEADER))
    return df.withColumn("headers", F.concat(others, header))


def _check_carrier(carrier: str) -> None:
    if carrier not in CARRIERS:
        raise BadFilterSetting("carrier", carrier, f"one of {', '.join(CARRIERS)}")


def _unless_business_key(packed: Column) -> Column:
    key = F.col("key").cast("binary")
    why = "with_stream_metadata: a row has a business key; drop the column key first, or use carrier header"
    return F.when(key.isNotNull() & ~is_stream_metadata(key), F.raise_error(F.lit(why))).otherwise(packed)


def number_by_digits(key: Column, position: int, size: int) -> Column:
    """`size` bytes (at most 8) of a binary column from `position` (counted from 1), big-endian, as a bigint."""
    return F.conv(F.hex(F.substring(key, position, size)), 16, -10).cast("bigint")


def _bytes(number: Column, size: int) -> Column:
    return F.unhex(F.lpad(F.hex(number), size * 2, "0"))


def _refuse(what: str, value: Column, largest: int) -> Column:
    text = F.concat(F.lit(f"{what} "), value.cast("string"), F.lit(f" is not in [0, {largest}]"))
    return F.raise_error(text).cast("binary")


def _column(name: Column | str) -> Column:
    return F.col(name) if isinstance(name, str) else name


def key_numbers(spark: SparkSession) -> Numbers:
    """The fastest way that this Spark has from eight bytes to a number."""
    return by_digits if over_connect(spark) else made_once(spark, key_numbers, lambda: by_prefix(spark) or by_digits)


_made: WeakKeyDictionary[SparkContext, dict[Hashable, Any]] = WeakKeyDictionary()


def made_once(spark: SparkSession, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """`make()` at the first call for `what`, then the same object for as long as Spark runs; anew over Spark Connect.

    For columns that every batch needs: to make one takes three calls into the JVM or more.
    """
    if over_connect(spark):
        return make()
    made = _made.setdefault(spark.sparkContext, {})
    if what not in made:
        made[what] = make()
    return cast("_Made", made[what])


def by_digits(key: str, position: int) -> Column:
    """By public functions of Spark."""
    return number_by_digits(F.expr(key), position, 8)


WHOLE = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True, init=False)
class SourcePosition:
    """Where a row's columns say that its record first lived; give it to a form of the filter as its `carrier`.

    All are SQL expressions over the frame's columns. `producer`: one whole number, which is the PID, or text, or
    several of either, which are hashed to it. `position`: one, a whole number in [0, 2^63), or several with the bits of
    each, the one that counts most first, 63 in all. Per producer and source partition it must ascend in the log, but
    for replays. `partition`: the source partition, by default the row's own partition of the log.
    A row whose parts of the position are all null has none: it passes, and is counted as unkeyed.
    Raises BadFilterSetting; with a frame FrameUnusable for what has no order. A null beside other values, or a number
    outside of its bits fails the query and is named there.
    """

    producer: tuple[str, ...]
    position: tuple[tuple[str, int], ...]
    partition: str = "partition"

    def __init__(
        self, producer: str | Sequence[str], position: str | Mapping[str, int], partition: str = "partition"
    ) -> None:
        if not isinstance(position, str | Mapping):
            raise BadFilterSetting(
                "position", position, "an expression, or several with their bits: {expression: bits}"
            )
        parts = {position: POSITION_BITS} if isinstance(position, str) else dict(position)
        PositionBits(*parts.values())  # refuses the rest
        producers = (producer,) if isinstance(producer, str) else tuple(producer)
        if not producers:
            raise BadFilterSetting("producer", producer, "an expression or several")
        object.__setattr__(self, "producer", producers)
        object.__setattr__(self, "position", tuple(parts.items()))
        object.__setattr__(self, "partition", partition)

    @property
    def is_tuple(self) -> bool:
        """Whether the distance of two positions means nothing."""
        return len(self.position) > 1

    def key(self, df: DataFrame) -> Column:
        """The 20 bytes of a row, null where it has no position. Raises FrameUnusable."""
        names = [name for name, _ in self.position]
        kinds = [field.dataType for field in df.select(*map(F.expr, (*self.producer, self.partition, *names))).schema]
        count = len(self.producer)
        for name, kind in zip(self.producer, kinds, strict=False):
            if not isinstance(kind, (*WHOLE, StringType, BinaryType, NullType)):
                raise _unfit(name, kind, "a producer is a whole number or text")
        for name, kind in zip((self.partition, *names), kinds[count:], strict=True):
            _check_ordered(name, kind)
        is_pid = count == 1 and isinstance(kinds[0], WHOLE)
        pid = f"cast({self.producer[0]} as bigint)" if is_pid else f"xxhash64({', '.join(self.producer)})"
        packed = pack_stream_metadata(F.expr(pid), F.expr(self.partition), F.expr(self._packed()))
        return F.when(F.expr(" and ".join(f"({name}) is null" for name in names)), F.lit(None)).otherwise(packed)

    def _packed(self) -> str:
        """In SQL: an expression that is made by functions costs a call into the JVM for each of its parts."""
        whole = [*self.producer, self.partition, *(name for name, _ in self.position)]
        refused = " ".join(f"when ({one}) is null then {_refusal(one, 'is null beside other parts')}" for one in whole)
        shift, terms = sum(bits for _, bits in self.position), []
        for name, bits in self.position:
            shift -= bits
            wide = f"({name}) not between 0 and {2**bits - 1}"
            refused += f" when {wide} then {_refusal(name, f'is not in [0, 2^{bits}): ', name)}"
            terms.append(f"shiftleft(cast({name} as bigint), {shift})")
        return f"case {refused} else {' + '.join(terms)} end"


def _check_ordered(name: str, kind: DataType) -> None:
    if isinstance(kind, WHOLE) or (isinstance(kind, DecimalType) and kind.scale == 0):
        return
    why = "give whole numbers"
    if isinstance(kind, StringType):
        why = "text is ordered as text, '10' below '9': give the numbers in it, each as a part"
    elif kind.typeName() in {"timestamp", "timestamp_ntz", "date"}:
        why = "two records may have one instant, and clocks go back: give the place in the source's log"
    elif kind.typeName() in {"float", "double"}:
        why = "large ones are rounded, so two records may have one: give whole numbers"
    raise _unfit(name, kind, why)


def _unfit(expression: str, kind: DataType, why: str) -> FrameUnusable:
    return FrameUnusable(f"position: {expression!r} is {kind.simpleString()}: {why}")


def _refusal(name: str, why: str, value: str | None = None) -> str:
    text = f"cast(X'{f'SourcePosition: {name} {why}'.encode().hex()}' as string)"
    return f"raise_error({text if value is None else f'concat({text}, cast({value} as string))'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRule:
    """How to filter. `carrier` key, header or a SourcePosition; `window` in offsets; `only_pids`: other PIDs pass.

    `retention_ms`: the topic's retention.ms; `ttl_s` must not be shorter. Raises BadFilterSetting.
    """

    carrier: str | SourcePosition = "key"
    window: int = 0
    only_pids: Iterable[int] | None = None
    ttl_s: float | None = None
    retention_ms: InitVar[int | None] = 0

    def __post_init__(self, retention_ms: int | None) -> None:
        if isinstance(self.carrier, SourcePosition):
            if self.window and self.carrier.is_tuple:
                raise BadFilterSetting("window", self.window, "0 where a position has several parts, and no distances")
        else:
            _check_carrier(self.carrier)
        check_window(self.window)
        object.__setattr__(self, "only_pids", checked_pids(self.only_pids))
        self.new_filter(HighwaterMarks())  # refuses the rest
        check_ttl(self.ttl_s, retention_ms)

    def new_filter(self, marks: HighwaterMarks) -> ReplayFilter:
        """A filter over these marks."""
        return ReplayFilter(marks, window=self.window, only_pids=self.only_pids, ttl_s=self.ttl_s)

    def key(self, df: DataFrame) -> Column:
        """The bytes of a row that may be metadata. Raises FrameUnusable."""
        return self.carrier.key(df) if isinstance(self.carrier, SourcePosition) else carrier_key(self.carrier, df)

    @property
    def carrier_name(self) -> str:
        """The carrier as text, as marks keep it: "key", "header", or the expressions of a position."""
        return str(self.carrier)

    @property
    def wanted(self) -> str:
        """What the filter looks for in a row; all others pass."""
        return "stream metadata" if self.only_pids is None else "stream metadata of one of only_pids"

    @property
    def pid_condition(self) -> str:
        """Whether the column `pid` is one of `only_pids`, in SQL; true without any."""
        if self.only_pids is None:
            return "true"
        return f"pid in ({', '.join(map(str, sorted(self.only_pids)))})" if self.only_pids else "false"

    @property
    def may_be_chance(self) -> bool:
        """Whether bytes that a producer wrote for another purpose may be taken for metadata."""
        return not isinstance(self.carrier, SourcePosition)

    @property
    def counts_gaps(self) -> bool:
        """Whether missing source offsets of a pair are missing records."""
        return not (isinstance(self.carrier, SourcePosition) and self.carrier.is_tuple)
