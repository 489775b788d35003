"""The filter in foreachBatch before a Delta table, beside no filter and Delta's own way to insert each key once (G16).

    Parquet (4 log partitions, 16 pairs, 4 M keys, 100-byte values) ─▶ 4 batches of a stream ─▶ append, or MERGE

MERGE inserts the rows of a batch whose keys the table does not hold; twice in one batch they would be inserted twice.
Each side begins with an empty table. Delta has no release for every Spark: PUSHREP_DELTA_JARS is a directory with
`delta-spark` and `delta-storage` for the pyspark of the Python that runs this, and ANTLR comes with Spark.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from benchmarks.harness import compare
from benchmarks.spark_filter import TABLE_GOALS, Bench, session, write_log

WARM_UPS = 3  # the compilers are busy with Delta's own code for longer than with Parquet's writer


def run(rounds: int) -> dict[str, Any]:
    jars = sorted(map(str, Path(os.environ["PUSHREP_DELTA_JARS"]).glob("*.jar")))
    settings = {
        "spark.jars": ",".join(jars),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-delta-") as place:
        home = Path(place)
        write_log(home / "new")
        spark = session(place, **settings)
        table = home / "work" / "table"

        def append(rows: DataFrame, batch_id: int) -> None:  # noqa: ARG001 - foreachBatch's signature
            rows.write.format("delta").mode("append").save(str(table))

        def merge(rows: DataFrame, batch_id: int) -> None:
            if not batch_id:
                append(rows, batch_id)
                return
            rows.createOrReplaceTempView("came")
            rows.sparkSession.sql(
                f"merge into delta.`{table}` held using came on held.key = came.key when not matched then insert *"
            )

        bench = Bench(spark, home, "new", append, batches=True)
        try:
            return {
                "every row is new, to a Delta table": compare(
                    {
                        "ReplayFilteredBatches": bench.filtered,
                        "no filter": bench.unfiltered,
                        "MERGE": lambda: bench.unfiltered(merge),
                    },
                    rounds=rounds,
                    warm_ups=WARM_UPS,
                    goals=TABLE_GOALS,
                )
            }
        finally:
            spark.stop()
