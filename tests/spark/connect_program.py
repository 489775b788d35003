"""A query that its test kills: python connect_program.py <place> <address of a server, or a master>

It reads the files of `<place>/files`, one a batch, into `<place>/found.db`, and says when it has started.
"""

import sqlite3
import sys
from contextlib import closing

COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, "
    "headers array<struct<key: string, value: binary>>"
)


class Table:
    """A user's own handler: a batch that is run again replaces its rows."""

    def __init__(self, place):
        self._path = f"{place}/found.db"

    def __call__(self, rows, batch_id):
        found = [(batch_id, row.partition, row.offset) for row in rows.select("partition", "offset").collect()]
        with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            database.execute("create table if not exists found (batch, partition, place)")
            database.execute("delete from found where batch = ?", (batch_id,))
            database.executemany("insert into found values (?, ?, ?)", found)


def main(place, where):
    from pyspark.sql import SparkSession

    from spark_jobs import FileMarks, ReplayFilteredBatches

    builder = SparkSession.builder
    spark = (builder.remote(where) if "://" in where else builder.master(where)).getOrCreate()
    events = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(f"{place}/files")
    once = ReplayFilteredBatches(Table(place), FileMarks(f"{place}/marks"))
    writer = events.writeStream.foreachBatch(once).option("checkpointLocation", f"{place}/checkpoint")
    query = writer.trigger(availableNow=True).start()
    print("started", flush=True)  # noqa: T201 - for who kills it
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
