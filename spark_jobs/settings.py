"""Settings of Spark: one for the length of a statement; the Python of its workers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession


@contextmanager
def setting(spark: SparkSession, name: str, value: str | int) -> Iterator[None]:
    """Set `name` in this session, and what it was before at the end. What is planned inside sees it."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def use_driver_python(spark: SparkSession) -> None:
    """Let the workers of a local master run the driver's own interpreter, unless another one is configured.

    Spark starts the `python3` of PATH. Where the virtual environment is not activated, that one lacks this package, and
    the first batch ends in a long Java trace. A cluster keeps its own settings: the driver's path means nothing there.
    """
    configured = "PYSPARK_PYTHON" in os.environ or any(
        spark.conf.get(name, None) for name in ("spark.pyspark.python", "spark.pyspark.driver.python")
    )
    context = spark.sparkContext
    if not configured and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable
