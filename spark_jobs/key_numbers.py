"""Eight bytes inside a key as a number, row by row in the JVM.

Spark's own functions lead from bytes to a number by digits only (columns.py), which takes longer than all else that
the first pass does with a key. Inside, Spark has what is wanted: `ByteArray.getPrefix`, which sorts compare by. It is
taken where it is there and gives what it should; the digits stand in for it anywhere else.
"""

from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from spark_jobs.columns import number_by_digits
from spark_jobs.spark_internals import asked

Numbers = Callable[[Column, int], Column]
"""(binary column, position from 1) → the eight bytes there, big-endian and signed; only for keys that hold them."""

_VECTORS: Final = (0, 1, 0x0102030405060708, 2**63 - 1, -1, -2, -(2**63))
_found: dict[str, Numbers] = {}  # by application: what it has does not change


def key_numbers(spark: SparkSession) -> Numbers:
    """The fastest way to numbers that this Spark has."""
    application = spark.sparkContext.applicationId
    if application not in _found:
        _found[application] = by_prefix(spark) or by_digits
    return _found[application]


def by_digits(key: Column, position: int) -> Column:
    """By functions that Spark promises."""
    return number_by_digits(key, position, 8)


def by_prefix(spark: SparkSession) -> Numbers | None:
    """By a function that Spark has inside; None where it is not, or is not what it was."""

    def look() -> Numbers | None:
        call = _prefix_of(spark.sparkContext._jvm)  # noqa: SLF001 - the door to Spark's own objects
        eights = [number.to_bytes(8, "big", signed=True) for number in _VECTORS]

        def prefix(key: Column, position: int) -> Column:
            return call(key if position == 1 else F.substring(key, position, 8))  # it reads the first eight itself

        calls = [prefix(F.lit(b"!" * (at - 1) + eight + b"key"), at) for eight in eights for at in (1, 4)]
        # One row of literals: the optimizer computes it, no job runs.
        found = spark.sql("select 1").select(*calls).first()
        return prefix if found is not None and found[::2] == found[1::2] == _VECTORS else None

    return asked(look)


def _prefix_of(jvm: Any) -> Callable[[Any], Column]:
    """A function from eight bytes to the call of ByteArray.getPrefix. Names are looked up once: each is a call."""
    from pyspark.sql.classic.column import Column as ClassicColumn  # noqa: PLC0415 - sessions of another kind lack it

    static_invoke = jvm.org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke
    expressions = jvm.org.apache.spark.sql.classic.ExpressionUtils
    nothing = getattr(getattr(jvm.scala.collection.immutable, "Nil$"), "MODULE$")
    none = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    number = getattr(getattr(jvm.org.apache.spark.sql.types, "LongType$"), "MODULE$")
    bytes_class = jvm.java.lang.Class.forName("org.apache.spark.unsafe.types.ByteArray")

    def call(eight: Any) -> Column:
        arguments = nothing.prepended(expressions.expression(eight._jc))  # noqa: SLF001
        # Null for null, never null for bytes, the same for the same bytes; no scalar function of a catalog behind it.
        called = static_invoke(bytes_class, number, "getPrefix", arguments, nothing, True, False, True, none)
        return ClassicColumn(expressions.column(called))

    return call
