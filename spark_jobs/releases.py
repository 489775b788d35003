"""What some releases of Spark lack, from 3.5 on: by other public means, or refused by name.

3.5   no DataFrame.toArrow, no arrow_udf, no transformWithState, no data sources in Python
4.0   no arrow_udf, no limits for streams of a Python data source (so 4.1)
4.2   all
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.pandas import types

from spark_jobs.errors import SparkJobError

STREAMS_SINCE: Final = (4, 2)
"""Data sources in Python know the start of a stream's batch, and its limits, from this release on."""


class SparkTooOld(SparkJobError):
    """This release of Spark lacks what something needs: use a newer one."""

    def __init__(self, what: str, needed: str) -> None:
        super().__init__(f"{what} needs Spark {needed} or newer: this is {pyspark.__version__}")
        self.what, self.needed = what, needed


def release() -> tuple[int, int]:
    """Of the pyspark that is installed: (3, 5), (4, 0), ..."""
    major, minor, *_ = pyspark.__version__.split(".")
    return int(major), int(minor)


def to_arrow(df: DataFrame) -> Any:
    """The frame's rows as an Arrow table on the driver."""
    if has_to_arrow(df):
        return df.toArrow()
    return pa.Table.from_pylist([row.asDict() for row in df.collect()], arrow_schema(df.schema))


def has_to_arrow(df: DataFrame) -> bool:
    """Whether this release hands rows over as Arrow by itself."""
    return hasattr(df, "toArrow")


def arrow_schema(schema: Any) -> Any:
    """The Arrow types by which Spark's workers hand over these columns; instants in UTC."""
    if release() >= (4, 2):
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)


def decisions_by(decide: Callable[[Any], Any]) -> Any:
    """A UDF over columns by an iterator of tuples of Arrow arrays, which yields arrays of int64.

    Nondeterministic for Spark, so that it runs once a row, over all rows, with nothing pushed below it.
    """
    if hasattr(F, "arrow_udf"):
        return F.arrow_udf(decide, "bigint").asNondeterministic()

    def by_pandas(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        arrays = (tuple(pa.Array.from_pandas(column) for column in columns) for columns in batches)
        return (decided.to_pandas() for decided in decide(arrays))

    return F.pandas_udf(by_pandas, "bigint").asNondeterministic()  # type: ignore[attr-defined] # at run time only
