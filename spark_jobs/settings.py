"""A setting of Spark for the length of one statement."""

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
