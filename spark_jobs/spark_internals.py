"""What is asked of Spark's inner objects, whose names it does not promise: each answer may be "nobody knows".

Where a Spark names them otherwise, the asker goes on by public means, which cost more and give the same rows.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation

from spark_jobs.releases import release

_LOG = logging.getLogger(__name__)

_LISTS: Final = frozenset({"LocalRelation", "OneRowRelation"})

_Answer = TypeVar("_Answer")


def asked(question: Callable[[], _Answer]) -> _Answer | None:
    """What Spark's inner objects answer; None where they have other names."""
    try:
        return question()
    except (Py4JError, PySparkException, AttributeError, ImportError, TypeError) as error:
        _LOG.debug("this Spark names its plans otherwise: %s", error)
        return None


def class_name(node: Any) -> str:
    """The class of one of Spark's objects, without its package."""
    return str(node.getClass().getSimpleName())


def is_local(df: DataFrame) -> bool | None:
    """Whether all rows come from lists inside the plan (values, a small Arrow table); None where nobody knows.

    What is projected from such a list the optimizer may compute itself, partition ids too: without tasks, as if there
    were one.
    """
    frame: Any = df._jdf  # noqa: SLF001 - there is no public question

    def look() -> bool:
        leaves = frame.queryExecution().optimizedPlan().collectLeaves()
        return all(class_name(leaves.apply(n)) in _LISTS for n in range(leaves.size()))

    return asked(look)


def is_observed(observation: Observation) -> bool:
    """Whether an action has filled it: `observation.get` waits for one that may never come."""
    inner: Any = observation

    def look() -> bool:
        future = inner._jo.future()  # noqa: SLF001 - there is no public question
        if release() < (4, 0):  # where it is told by a queue of events, some time after the action
            context: Any = SparkContext._active_spark_context  # noqa: SLF001
            scala = context._jvm.scala.concurrent  # noqa: SLF001
            scala.Await.ready(future, scala.duration.Duration.apply("2s"))
        return bool(future.isCompleted())

    return asked(look) or False
