"""Data sources for Spark, written in Python; `register_sources(spark)` makes them known to a session."""

from pyspark.sql import SparkSession

from spark_jobs.settings import use_driver_python
from spark_jobs.sources.datasource import PushrepDataSource

__all__ = ["PushrepDataSource", "register_sources"]


def register_sources(spark: SparkSession) -> None:
    """Register "pushrep": `spark.read.format("pushrep").option("path", directory).option("topic", topic).load()`.

    For this session only; registering again replaces it. Executors import `spark_jobs`: install it there too.
    """
    use_driver_python(spark)
    spark.dataSource.register(PushrepDataSource)
