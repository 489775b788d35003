"""A position of one's own in place of stream metadata: for topics whose producers write no 20 bytes.

    SourcePosition(producer="source.name", position={"binlog": 19, "source.pos": 32, "source.row": 12})
         │ SQL over the row's columns
         ▼
    pid = the producer's number, or xxhash64 of its text · source partition = the row's partition · packed position
         │ as 20 bytes (columns.py), in a column of the filter's own: the row's key stays what it is
         ▼
    every form of the filter, as if a producer of ours had written them

Why the row's own log partition as source partition: who spreads one source over a topic's partitions by key, as
Debezium does, keeps the source's order in each of them, so each has a mark of its own, and no pair is split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
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
from filtering.position import POSITION_BITS, PositionBits
from spark_jobs.columns import pack_stream_metadata
from spark_jobs.errors import SparkJobError

_WHOLE = (ByteType, ShortType, IntegerType, LongType)


class PositionUnfit(SparkJobError):
    """An expression of a SourcePosition gives nothing that serves; `expression` and `kind` (a type) say which."""

    def __init__(self, expression: str, kind: str, why: str) -> None:
        super().__init__(f"position: {expression!r} is {kind}: {why}")
        self.expression, self.kind, self.why = expression, kind, why


@dataclass(frozen=True, slots=True, init=False)
class SourcePosition:
    """Where a row's columns say that its record first lived; give it to a form of the filter as its `carrier`.

    All are SQL expressions over the frame's columns. `producer`: one whole number, which is the PID, or text, or
    several of either, which are hashed to it. `position`: one, a whole number in [0, 2^63), or several with the bits of
    each, the one that counts most first, 63 in all. Per producer and source partition it must ascend in the log, but
    for replays. `partition`: the source partition, by default the row's own partition of the log.
    A row whose parts of the position are all null has none: it passes, and is counted as unkeyed.
    Raises BadFilterSetting; with a frame PositionUnfit for what has no order. A null beside other values, or a number
    outside of its bits fails the query and is named there.
    """

    producer: tuple[str, ...]
    position: tuple[tuple[str, int], ...]
    partition: str = "partition"

    def __init__(
        self, producer: str | Sequence[str], position: str | Mapping[str, int], partition: str = "partition"
    ) -> None:
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
        """The 20 bytes of a row, null where it has no position. Raises PositionUnfit."""
        names = [name for name, _ in self.position]
        kinds = [field.dataType for field in df.select(*map(F.expr, (*self.producer, self.partition, *names))).schema]
        count = len(self.producer)
        for name, kind in zip(self.producer, kinds, strict=False):
            if not isinstance(kind, (*_WHOLE, StringType, BinaryType, NullType)):
                raise PositionUnfit(name, kind.simpleString(), "a producer is a whole number or text")
        for name, kind in zip((self.partition, *names), kinds[count:], strict=True):
            _check_ordered(name, kind)
        is_pid = count == 1 and isinstance(kinds[0], _WHOLE)
        pid = f"cast({self.producer[0]} as bigint)" if is_pid else f"xxhash64({', '.join(self.producer)})"
        packed = pack_stream_metadata(F.expr(pid), F.expr(self.partition), F.expr(self._packed()))
        return F.when(F.expr(" and ".join(f"({name}) is null" for name in names)), F.lit(None)).otherwise(packed)

    def _packed(self) -> str:
        """In SQL, as an expression made by functions costs a call into the JVM for each of its parts."""
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
    if isinstance(kind, _WHOLE) or (isinstance(kind, DecimalType) and kind.scale == 0):
        return
    why = "give whole numbers"
    if isinstance(kind, StringType):
        why = "text is ordered as text, '10' below '9': give the numbers in it, each as a part"
    elif kind.typeName() in {"timestamp", "timestamp_ntz", "date"}:
        why = "two records may have one instant, and clocks go back: give the place in the source's log"
    elif kind.typeName() in {"float", "double"}:
        why = "large ones are rounded, so two records may have one: give whole numbers"
    raise PositionUnfit(name, kind.simpleString(), why)


def _refusal(name: str, why: str, value: str | None = None) -> str:
    text = f"cast(X'{f'SourcePosition: {name} {why}'.encode().hex()}' as string)"
    return f"raise_error({text if value is None else f'concat({text}, cast({value} as string))'})"
