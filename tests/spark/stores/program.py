"""Table, marks and checkpoint in an object store, by Hadoop's client. A JSON line tells what was seen.

python program.py stops <root> <settings: JSON> <jars>      stopped before and behind each write, and run again
                  drivers <root> <settings> <jars> <unfit: JSON>   two drivers of one query; stores without conditional
                                                  writes: <unfit> has settings for each that differ from <settings>
                  back <root> <settings> <jars>             a checkpoint that went back, and another query
                  query <root> <settings> <jars> <n>        of <n> files; waits to be killed in its batch 1 if <n> is 2
"""

import contextlib
import itertools
import json
import sys
import threading
import time
from pathlib import Path

COLUMNS = "key binary, value string, topic string, partition int, offset bigint"
BATCHES = ([0, 1, 2, 5], [3, 1, 5, 6, 2], [6, 7, 8])
"""Source offsets of one pair, in the order of the log."""


def session(settings, jars):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    settings = {f"spark.hadoop.{name}": value for name, value in settings.items()} | {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def rows(spark, number):
    from filtering import StreamMetadata

    first = sum(map(len, BATCHES[:number]))
    cells = [(StreamMetadata(7, 0, s).pack(), f"v{s}", "t", 0, first + n) for n, s in enumerate(BATCHES[number])]
    return spark.createDataFrame(cells, COLUMNS).coalesce(1)


def expected(spark, batches):
    """SQL's answer over the whole log: (batch, value) of the rows above all that came before them."""
    log = [(n, f"v{s}", s) for n, sources in enumerate(BATCHES[:batches]) for s in sources]
    frame = spark.createDataFrame(
        [(i, *row) for i, row in enumerate(log)], "i int, batch int, value string, source int"
    )
    frame.createOrReplaceTempView("log")
    answer = spark.sql(
        "select batch, value from (select *, max(source) over (order by i rows between unbounded preceding "
        "and 1 preceding) as before from log) where before is null or source > before"
    )
    return sorted(tuple(row) for row in answer.collect())


def held(spark, table):
    found = spark.read.schema("value string, batch_id bigint").parquet(table)
    return sorted((row.batch_id, row.value) for row in found.collect())


def stops(spark, root):
    """In-process stops: nothing that runs behind a stop is the program's, as behind kill -9."""
    from spark_jobs import ReplayFilteredBatches, idempotent_table
    from spark_jobs.file_marks import FileMarks
    from spark_jobs.sinks.hadoop import HadoopDirectory

    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "q")
    left, is_dead = itertools.count(1), threading.Event()

    class Stopped(BaseException):
        pass

    def step():
        if is_dead.is_set() or next(left) == 0:
            is_dead.set()
            raise Stopped

    def stopping(inner):
        def stepped(*told):
            step()
            result = inner(*told)
            step()
            return result

        return stepped

    for name in ("remove", "rename", "_put_new"):
        setattr(HadoopDirectory, name, stopping(getattr(HadoopDirectory, name)))
    frames, answer = [rows(spark, n) for n in range(2)], expected(spark, 2)
    for point in range(100):
        place = f"{root}/stops/{point}"
        left = itertools.count(-point)
        stopped = False
        for _ in range(2):
            once = ReplayFilteredBatches(idempotent_table(f"{place}/table"), FileMarks(f"{place}/marks", spark))
            with contextlib.suppress(Stopped):
                for number, frame in enumerate(frames):
                    once(frame, number)
                break
            stopped, left = True, itertools.count(1)
            is_dead.clear()
        left = itertools.count(1)
        assert held(spark, f"{place}/table") == answer, f"stopped at point {point}"
        store = FileMarks(f"{place}/marks", spark)
        assert store.batches("q") == [0, 1]
        (marks,) = store.read("q", 1).marks.values()
        assert marks.get(7, 0).offset == 6
        if not stopped:
            return {"points": point}
    raise AssertionError("no end of write points")


def drivers(spark, root, unfit):
    from spark_jobs import ReplayFilteredBatches
    from spark_jobs.batch_marks import MarksFenced
    from spark_jobs.file_marks import FileMarks
    from spark_jobs.sinks.catalog_table import idempotent_table
    from spark_jobs.sinks.hadoop import HadoopDirectory
    from spark_jobs.sinks.idempotent_sink import BadSink

    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "q")
    place = f"{root}/drivers/marks"
    kept = []

    def second_in_between(frame, batch_id):
        """While the first driver's handler runs, the second driver runs the whole batch."""
        if not kept:
            kept.append("first")
            ReplayFilteredBatches(lambda rows, batch_id: kept.append("second"), FileMarks(place, spark))(
                frame, batch_id
            )

    told = {}
    try:
        ReplayFilteredBatches(second_in_between, FileMarks(place, spark))(rows(spark, 0), 0)
    except MarksFenced as error:
        told["second"] = str(error)
    # At the very same moment: both have looked, both put the same name.
    directory = HadoopDirectory(spark, f"{root}/drivers/names")
    told["at_once"] = [at_once(directory, f"n{turn}") for turn in range(20)]
    told["again"] = directory.create_bytes("n0", b"third")
    told["aside"] = sorted(set(directory.names()) - {f"n{turn}" for turn in range(20)})
    try:
        idempotent_table(f"{root}/unfit/table", partition_by=["topic"]).check(spark, rows(spark, 0).schema, None)
    except BadSink as error:
        told["partitioned"] = str(error)
    told["table"], told["rows"] = second_begins(spark, f"{root}/drivers/table")
    told["unfit"] = {name: refusal(spark, f"{root}/unfit/{name}", more) for name, more in json.loads(unfit).items()}
    told["left"] = [HadoopDirectory(spark, f"{root}/unfit/{name}").names() for name in told["unfit"]]
    return told


def told_table(path, query_id="q"):
    """A table that was told of its query's batch 0."""
    from spark_jobs import idempotent_table

    table = idempotent_table(path)
    table.expect(query_id, 0, ())
    return table


def second_begins(spark, path):
    """A second driver writes the whole batch when the first has written it aside: how the first ends, and the rows."""
    from spark_jobs.sinks.directory_table import DirectoryTable
    from spark_jobs.sinks.idempotent_sink import BadSink

    name, told = "_write_aside", "it ended by itself"
    write_aside = getattr(DirectoryTable, name)

    def second(*given):
        write_aside(*given)
        setattr(DirectoryTable, name, write_aside)
        told_table(path)(rows(spark, 0), 0)

    setattr(DirectoryTable, name, second)
    try:
        told_table(path)(rows(spark, 0), 0)
    except BadSink as error:
        told = str(error)
    return told, len(held(spark, path))


def refusal(spark, place, settings):
    """How marks in a store with these settings are refused."""
    from spark_jobs.errors import StoreUnfit
    from spark_jobs.file_marks import FileMarks

    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    settings |= {f"fs.{place.partition(':')[0]}.impl.disable.cache": "true"}
    before = {name: hadoop.get(name) for name in settings}
    for name, text in settings.items():
        hadoop.set(name, text)
    try:
        FileMarks(place, spark).owner()
    except StoreUnfit as error:
        return str(error)
    finally:
        for name, text in before.items():
            hadoop.unset(name) if text is None else hadoop.set(name, text)
    return "taken"


def back(spark, root):
    """The checkpoint went back from batch 2 to batch 1, which is planned with other records; then another query."""
    from spark_jobs import ReplayFilteredBatches, idempotent_table
    from spark_jobs.errors import MarksOfAnotherQuery
    from spark_jobs.file_marks import FileMarks
    from spark_jobs.sinks.idempotent_sink import TableNotOurs

    def run(query, number, batch, **adopt):
        spark.sparkContext.setLocalProperty("sql.streaming.queryId", query)
        table, marks = idempotent_table(f"{root}/back/table", **adopt), FileMarks(f"{root}/back/marks", spark)
        ReplayFilteredBatches(table, marks, **adopt)(rows(spark, number), batch)

    for number, batch in enumerate((0, 1, 2)):
        run("q", number, batch)
    run("q", 2, 1)
    told = {"q": held(spark, f"{root}/back/table")}
    for error, attempt in (
        (MarksOfAnotherQuery, lambda: run("r", 1, 0)),
        (TableNotOurs, lambda: told_table(f"{root}/back/table", "r")(rows(spark, 1), 0)),
    ):
        try:
            attempt()
        except error as refused:
            told[error.__name__] = str(refused)
    run("r", 1, 0, adopt=("q", 0))
    told["r"] = held(spark, f"{root}/back/table")
    return told


def at_once(directory, name):
    """Two writers begin together: which of them report that they created the file, and which one did."""
    begins, made = threading.Barrier(2), []

    def writer(text):
        begins.wait()
        if directory.create_bytes(name, text.encode()):
            made.append(text)

    writers = [threading.Thread(target=writer, args=(text,)) for text in ("first", "second")]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    return made, directory.read(name)


def query(spark, root, batches):
    """A query from files into a table; all of it is in the store."""
    from spark_jobs import ReplayFilteredBatches, idempotent_table
    from spark_jobs.file_marks import FileMarks

    batches = int(batches)
    for number in range(batches):
        files = f"{root}/query/log/{number}"
        rows(spark, number).write.mode("ignore").parquet(files)
        time.sleep(1.1)  # files of one second come in any order
    table = idempotent_table(f"{root}/query/table")

    def handler(frame, batch_id):
        table(frame, batch_id)
        if batches == 2 and batch_id == 1:
            print("in batch 1", flush=True)  # noqa: T201 - for who kills it
            time.sleep(600)

    handler.drop_from = table.drop_from
    events = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(f"{root}/query/log/*")
    once = ReplayFilteredBatches(handler, FileMarks(f"{root}/query/marks", spark))
    writer = events.writeStream.foreachBatch(once).option("checkpointLocation", f"{root}/query/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    assert held(spark, f"{root}/query/table") == expected(spark, batches)
    return {"rows": len(expected(spark, batches))}


def main(what, root, settings, jars, *more):
    spark = session(json.loads(settings), jars)
    try:
        print(json.dumps(globals()[what](spark, root, *more)), flush=True)  # noqa: T201 - its answer
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main(*sys.argv[1:])
