"""A query over the text files of <place>/in with whatever release of Spark this Python has; prints what it read.

python file_stream_program.py <place>
"""

import json
import sys
from pathlib import Path


def main():
    from pyspark.sql import SparkSession

    place, read = Path(sys.argv[1]), []
    spark = SparkSession.builder.master("local[1]").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.readStream.format("text").load(str(place / "in"))
    writer = frame.writeStream.foreachBatch(lambda rows, _: read.extend(sorted(row.value for row in rows.collect())))
    writer = writer.option("checkpointLocation", str(place / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()
    (place / "read.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main()
