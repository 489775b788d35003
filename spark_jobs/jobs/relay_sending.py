"""The relay's handler: a batch's rows into a topic, each with its own place in the source as the next hop's metadata.

    rows ─▶ one task per source partition, in log order ─▶ SourcePartitionProducer of that task ─▶ topic

A task owns its client and ends when all its records are acknowledged. Killed anywhere, the batch runs again and sends
again, from its first record on: records that are then in the topic twice are replays, which readers with a filter drop.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering import StreamMetadata
from spark_jobs.errors import SparkJobError
from spark_jobs.spark_internals import a_task_a_number


class RecordNotRelayed(SparkJobError):
    """A record can't go to the destination as it is; no later record of its partition is sent."""

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(f"record {offset} of {topic}-{partition} can't be relayed: {why}")
        self.topic, self.partition, self.offset, self.why = topic, partition, offset, why


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What every task of one batch needs. pids: by source topic and partition. Pickled to the workers."""

    client: Mapping[str, Any]
    topic: str
    partition_count: int
    carrier: Literal["key", "header"]
    source_carrier: str
    retention_ms: int | None
    pids: Mapping[tuple[str, int], int]

    def send(self, rows: DataFrame) -> int:
        """Every row is in the topic when this returns; how many. Raises what a task raised, as Spark wraps it."""
        columns: list[Any] = [
            "topic",
            "partition",
            "offset",
            "key",
            "value",
            F.unix_millis("timestamp").alias("timestamp_ms"),
        ]
        if "headers" in rows.columns:
            columns.append("headers")
        # Spark sorts: a task gets source partitions whole, in log order.
        tasks = 1 + max((partition for _, partition in self.pids), default=0)
        ordered = a_task_a_number(rows.select(*columns), tasks, "partition")
        ordered = ordered.sortWithinPartitions("topic", "partition", "offset")
        [[sent]] = ordered.mapInArrow(self._task, "sent bigint").agg(F.sum("sent")).collect()
        return int(sent or 0)

    def _task(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa  # noqa: PLC0415 - on a worker, where pyspark brings it

        from partitioner.confluent import SourcePartitionProducer  # noqa: PLC0415 - librdkafka starts where it is used

        sent = 0
        with ExitStack() as stack:
            producer = None
            for batch in batches:
                if producer is None and len(batch):
                    producer = stack.enter_context(
                        SourcePartitionProducer(
                            self.client, self.topic, partition_count=self.partition_count, carrier=self.carrier
                        )
                    )
                for row in batch.to_pylist():
                    self._produce(producer, row)
                sent += len(batch)
        yield pa.RecordBatch.from_pydict({"sent": pa.array([sent], pa.int64())})

    def _produce(self, producer: Any, row: dict[str, Any]) -> None:
        place = (row["topic"], row["partition"], row["offset"])
        pid = self.pids.get(place[:2])
        if pid is None:
            raise RecordNotRelayed(*place, "its partition was not there when the batch began: run the batch again")
        own_key = None if self.source_carrier == "key" and StreamMetadata.try_unpack(row["key"]) else row["key"]
        if own_key is not None and self.carrier == "key":
            why = "it has a key of its own, which the metadata would replace: give --to-carrier header"
            raise RecordNotRelayed(*place, why)
        age_ms = time.time_ns() // 1_000_000 - row["timestamp_ms"]
        if self.retention_ms is not None and age_ms > self.retention_ms:
            why = (
                f"it is {age_ms} ms old, and topic {self.topic} has retention.ms={self.retention_ms}: raise that first"
            )
            raise RecordNotRelayed(*place, why)
        producer.produce(
            StreamMetadata(pid, row["partition"], row["offset"]),
            row["value"],
            key=own_key,
            headers=[(header["key"], header["value"]) for header in row.get("headers") or ()],
            timestamp_ms=row["timestamp_ms"],
        )
