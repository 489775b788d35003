"""A query over a Kafka topic that is sent back between its runs; prints what each run read, as JSON lines.

python kafka_stream_program.py <place> <bootstrap servers> <topic> <jars>
"""

import json
import sys
from pathlib import Path


def main():
    from pyspark.sql import SparkSession

    from pushrep.startpoints import Startpoint, StartpointStore
    from spark_jobs.checkpoint_apply import CheckpointPlace, apply

    place, servers, topic, jars = Path(sys.argv[1]), *sys.argv[2:5]
    spark = SparkSession.builder.master("local[1]").config("spark.jars", jars).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    frame = spark.readStream.format("kafka").options(**options).load()

    def run():
        read = []
        writer = frame.writeStream.foreachBatch(
            lambda rows, _: read.extend(sorted((row.partition, row.offset) for row in rows.collect()))
        )
        writer = writer.option("checkpointLocation", str(place / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return read

    runs = [run()]
    store = StartpointStore.open(place / "store")
    for partition, wish in ((1, Startpoint.specific(3)), (0, Startpoint.relative(records=-2))):
        store.write("billing", topic, partition, wish, "again")
        apply(CheckpointPlace(checkpoint=place / "checkpoint", consumer="billing"), store, sleep=lambda _s: None)
        runs.append(run())
    runs.append(run())
    spark.stop()
    (place / "runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
