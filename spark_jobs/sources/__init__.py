"""Data sources for Spark, written in Python; `register_sources(spark)` makes them known to a session."""

from pyspark.sql import SparkSession

from spark_jobs.spark_internals import release, too_old, use_driver_python

__all__ = ["register_sources"]


def register_sources(spark: SparkSession) -> None:
    """Register "pushrep": `spark.read.format("pushrep").option("path", directory).option("topic", topic).load()`.

    For this session only; registering again replaces it. Executors import `spark_jobs`: install it there too.
    Raises SparkUnfit before Spark 4.0, and its stream before 4.2.
    """
    if release() < (4, 0):
        raise too_old("source pushrep", "4.0")
    from spark_jobs.sources.datasource import PushrepDataSource  # noqa: PLC0415 - Spark 3.5 has no such sources

    use_driver_python(spark)
    spark.dataSource.register(PushrepDataSource)
