"""spark_jobs: Spark reads pushrep's logs and Kafka topics, and hands every record on once.

Names resolve when first used, so that `import spark_jobs.errors` loads no Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from filtering.extras import needed_by

if TYPE_CHECKING:
    from spark_jobs.columns import SourcePosition, carrier_key, stream_metadata_columns, with_stream_metadata
    from spark_jobs.errors import SparkJobError
    from spark_jobs.file_marks import FileMarks
    from spark_jobs.frame import filter_frame
    from spark_jobs.keyed_state import filter_replays
    from spark_jobs.replay_filter import ReplayFilteredBatches
    from spark_jobs.sinks.catalog_table import idempotent_table
    from spark_jobs.sinks.several import all_of
    from spark_jobs.sources import register_sources

_HOME = {
    "FileMarks": "spark_jobs.file_marks",
    "ReplayFilteredBatches": "spark_jobs.replay_filter",
    "SourcePosition": "spark_jobs.columns",
    "SparkJobError": "spark_jobs.errors",
    "all_of": "spark_jobs.sinks.several",
    "carrier_key": "spark_jobs.columns",
    "filter_frame": "spark_jobs.frame",
    "filter_replays": "spark_jobs.keyed_state",
    "idempotent_table": "spark_jobs.sinks.catalog_table",
    "register_sources": "spark_jobs.sources",
    "stream_metadata_columns": "spark_jobs.columns",
    "with_stream_metadata": "spark_jobs.columns",
}

__all__ = [
    "FileMarks",
    "ReplayFilteredBatches",
    "SourcePosition",
    "SparkJobError",
    "all_of",
    "carrier_key",
    "filter_frame",
    "filter_replays",
    "idempotent_table",
    "register_sources",
    "stream_metadata_columns",
    "with_stream_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spark_jobs' has no attribute {name!r}")
    with needed_by(f"spark_jobs.{name}"):
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
