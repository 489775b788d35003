"""spark_jobs: Spark reads pushrep's logs and Kafka topics, and hands every record on once.

Names resolve when first used, so that `import spark_jobs.errors` loads no Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_jobs.columns import carrier_key, stream_metadata_columns, with_stream_metadata
    from spark_jobs.errors import SparkJobError
    from spark_jobs.sources import register_sources

_HOME = {
    "SparkJobError": "spark_jobs.errors",
    "carrier_key": "spark_jobs.columns",
    "register_sources": "spark_jobs.sources",
    "stream_metadata_columns": "spark_jobs.columns",
    "with_stream_metadata": "spark_jobs.columns",
}

__all__ = [
    "SparkJobError",
    "carrier_key",
    "register_sources",
    "stream_metadata_columns",
    "with_stream_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spark_jobs' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
