"""Code that depends on the release of Spark: internal objects, and features that old releases lack.

Spark does not guarantee the names of its internal objects; no other module uses them. If a release has other names,
`asked` returns None, and the caller uses public means, which are slower and give the same rows:

    by_prefix                       numbers are converted from bytes through their hexadecimal digits
    column_pruned                   each pass reads all columns, from the frame of foreachBatch
    RowsRead                        a handler that read fewer rows than the first pass found is not detected
    ShuffleSession                  the first pass has as many shuffle tasks as the session's setting says
    hadoop_of                       no replacement: a path can't be a table; use a catalog table or a database

    3.5   no DataFrame.toArrow, no transformWithState, no data sources in Python
    4.0   no repartitionById, no limits for streams of a Python data source (so 4.1)
    4.2   all

A Spark Connect session has no internal objects: it is a client of a server.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.pandas import types

from spark_jobs.errors import SparkUnfit

_LOG = logging.getLogger(__name__)

_CONNECT: Final = "pyspark.sql.connect"
_SHUFFLE: Final = "spark.sql.shuffle.partitions"

_Answer = TypeVar("_Answer")


def asked(question: Callable[[], _Answer]) -> _Answer | None:
    """The result of `question` about Spark's internal objects; None if this release has other ones."""
    try:
        return question()
    except (Py4JError, PySparkException, AttributeError, ImportError, TypeError) as error:
        _LOG.debug("this release of Spark has other internal objects: %s", error)
        return None


def _jvm_of(spark: Any) -> Any:
    return spark.sparkContext._jvm  # noqa: SLF001 - Spark's own objects have no public access


def _class_of(jvm: Any, name: str) -> Any:
    """A class by its full name, in one call. `jvm.java.util.UUID` costs a call and a class lookup for each part."""
    return getattr(jvm, name)


def _object_of(jvm: Any, name: str) -> Any:
    return getattr(_class_of(jvm, f"{name}$"), "MODULE$")


def hadoop_of(spark: SparkSession, what: str, instead: str) -> tuple[Any, Any]:
    """The JVM, for its Hadoop client, and Spark's Hadoop configuration.

    what, instead: for the message of SparkUnfit, which is raised in a Spark Connect session.
    """
    if over_connect(spark):
        raise SparkUnfit(f"{what}: not over Spark Connect; {instead}")
    context: Any = spark.sparkContext
    return _jvm_of(spark), context._jsc.hadoopConfiguration()  # noqa: SLF001


def class_name(node: Any) -> str:
    """The class of one of Spark's objects, without its package."""
    return str(node.getClass().getSimpleName())


def over_connect(spark: SparkSession) -> bool:
    """Whether this is a Spark Connect session: a client of a server, without a JVM."""
    return type(spark).__module__.startswith(_CONNECT)


def query_id_of(spark: SparkSession) -> str | None:
    """The id of the query whose foreachBatch calls this; None outside of foreachBatch. It is stored in the checkpoint.

    In a Spark Connect session it is the only running query of the session, if there is one. Raises SparkUnfit for
    several.
    """
    if not over_connect(spark):
        return spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    running = [str(query.id) for query in spark.streams.active]
    if len(running) > 1:
        raise SparkUnfit("several queries in one session of Spark Connect: use one for each, else a batch's is unknown")
    return running[0] if running else None


STREAMS_SINCE: Final = (4, 2)
"""From this release on, Python data sources get the start of a stream's batch, and its limits."""


def too_old(what: str, needed: str) -> SparkUnfit:
    """The refusal of what this release of Spark lacks."""
    return SparkUnfit(f"{what} needs Spark {needed} or newer: this is {pyspark.__version__}")


def release() -> tuple[int, int]:
    """The release of the installed pyspark: (3, 5), (4, 0), ..."""
    major, minor, *_ = pyspark.__version__.split(".")
    return int(major), int(minor)


def to_arrow(df: DataFrame) -> Any:
    """The frame's rows as an Arrow table on the driver."""
    if has_to_arrow(df):
        return df.toArrow()
    return pa.Table.from_pylist([row.asDict() for row in df.collect()], arrow_schema(df.schema))


def has_to_arrow(df: DataFrame) -> bool:
    """Whether this release has DataFrame.toArrow."""
    return hasattr(df, "toArrow")


def arrow_schema(schema: Any) -> Any:
    """The Arrow schema that Spark's workers use for these columns; timestamps are in UTC."""
    if release() >= (4, 2):
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)


def quoted(name: str) -> str:
    """A column's name in SQL, and for functions that take a dot in a name for a field."""
    return "`" + name.replace("`", "``") + "`"


def map_in_arrow(df: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]], schema: Any) -> DataFrame:
    """`df.mapInArrow`, which takes a dot in a column's name for a field: such a frame goes there under other names."""
    names = df.columns
    if not any(set(name) & {".", "`"} for name in names):
        return df.mapInArrow(function, schema)

    def with_names(batches: Iterator[Any]) -> Iterator[Any]:
        yield from function(_renamed(batch, names) for batch in batches)

    return df.toDF(*(f"_{number}" for number in range(len(names)))).mapInArrow(with_names, schema)


def _renamed(batch: Any, names: list[str]) -> Any:
    fields = [field.with_name(name) for field, name in zip(batch.schema, names, strict=True)]
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


def a_task_a_number(rows: DataFrame, tasks: int, column: str) -> DataFrame:
    """Rows with the same number (below `tasks`) in one task; before 4.1 a task may have the rows of several numbers."""
    if release() < (4, 1):
        return rows.repartition(tasks, column)
    return rows.repartitionById(tasks, column)


class ShuffleSession:
    """A copy of the session of one query, in which a shuffle has at most as many tasks as run at once (`tasks`).

    Spark's default is 200 tasks, and a setting of the query's own session would be its handler's, too.
    """

    def __init__(self) -> None:
        self._of: Any = None
        self._copy: Any = None
        self._datasets: Any = None

    def planned(self, df: DataFrame, tasks: int) -> DataFrame:
        """The frame, whose actions are planned in this session."""
        return asked(lambda: self._planned(df, tasks)) or df

    def _planned(self, df: DataFrame, tasks: int) -> DataFrame | None:
        if over_connect(df.sparkSession):
            return None
        own: Any = df._jdf.sparkSession()  # noqa: SLF001 - Spark's own objects have no public access
        if self._copy is None or not own.equals(self._of):
            self._of, self._copy = own, own.cloneSession()
            self._copy.conf().set(_SHUFFLE, min(tasks, int(own.conf().get(_SHUFFLE))))
            name = "org.apache.spark.sql.Dataset" if release() < (4, 0) else "org.apache.spark.sql.classic.Dataset"
            self._datasets = _class_of(_jvm_of(df.sparkSession), name)
        plan = df._jdf.queryExecution().analyzed()  # noqa: SLF001
        return DataFrame(self._datasets.ofRows(self._copy, plan), df.sparkSession)


_OF_A_QUERY: Final = (
    "spark.jobGroup.id",
    "spark.job.description",
    "spark.job.interruptOnCancel",
    "sql.streaming.queryId",
    "streaming.sql.batchId",
)
"""Properties that Spark sets for the thread of a query. By the group it ends the jobs of a query that is stopped."""


def in_thread(spark: SparkSession, call: Callable[[], _Answer]) -> Callable[[], _Answer]:
    """`call`, for another thread: there its Spark jobs are those of this thread's query."""
    if over_connect(spark):
        return call
    context = spark.sparkContext
    kept = {name: context.getLocalProperty(name) for name in _OF_A_QUERY}

    def of_the_query() -> _Answer:
        for name, value in kept.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes it
        return call()

    return of_the_query


def use_driver_python(spark: SparkSession) -> None:
    """Let the workers of a local master run the driver's interpreter, unless another one is configured, and let those
    that Spark starts beside the driver find this package where `--py-files` brought it as an archive.

    Spark starts the `python3` of PATH. If the virtual environment is not activated, this interpreter lacks this
    package, and the first batch ends with a long Java trace. The settings of a cluster and of a Spark Connect server do
    not change: the driver's path may not exist there.

    The worker beside the driver that names a streaming operator's state, since 4.2, gets no archives from Spark, only
    the environment of the functions. Executors ignore a path that they don't have: Spark sends them the archive.
    """
    if over_connect(spark):
        return
    configured = "PYSPARK_PYTHON" in os.environ or any(
        spark.conf.get(name, None) for name in ("spark.pyspark.python", "spark.pyspark.driver.python")
    )
    context, package = spark.sparkContext, Path(__file__).parents[1]
    if package.is_file():
        known = context.environment.get("PYTHONPATH", "").split(os.pathsep)
        context.environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(package), *filter(None, known)]))
    if not configured and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable


# Spark's public functions convert bytes to a number only through digits (columns.py), which takes longer than the rest
# of the first pass. Spark's internal `ByteArray.getPrefix`, with which sorts compare, does it directly. It is used if
# it exists and gives the right numbers.
Numbers = Callable[[str, int], Column]
"""(binary expression in SQL, position from 1) → the eight bytes at this position as a number, big-endian and signed.
The key must have these bytes. The expression is SQL text: one built by functions costs a JVM call for each part."""

_VECTORS: Final = (0, 1, 0x0102030405060708, 2**63 - 1, -1, -2, -(2**63))


def by_prefix(spark: SparkSession) -> Numbers | None:
    """`Numbers` by an internal function of Spark; None if this release lacks it, or it gives other numbers."""

    def look() -> Numbers | None:
        call = _prefix_of(_jvm_of(spark))
        eights = [number.to_bytes(8, "big", signed=True) for number in _VECTORS]

        def prefix(key: str, position: int) -> Column:
            # getPrefix reads the first eight bytes, so position 1 needs no substring.
            return call(F.expr(key if position == 1 else f"substring({key}, {position}, 8)"))

        calls = [prefix(f"X'{(b'!' * (at - 1) + eight + b'key').hex()}'", at) for eight in eights for at in (1, 4)]
        # A row of literals: the optimizer computes it, so no job runs.
        found = spark.sql("select 1").select(*calls).first()
        return prefix if found is not None and found[::2] == found[1::2] == _VECTORS else None

    return asked(look)


def _prefix_of(jvm: Any) -> Callable[[Any], Column]:
    """A function that gives the column `ByteArray.getPrefix(eight bytes)`. Each name costs a JVM call, so all are
    looked up once, here.
    """
    from pyspark.sql.classic.column import Column as ClassicColumn  # noqa: PLC0415 - missing with Spark Connect alone

    static_invoke = _class_of(jvm, "org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke")
    expressions = _class_of(jvm, "org.apache.spark.sql.classic.ExpressionUtils")
    nothing = _object_of(jvm, "scala.collection.immutable.Nil")
    none = _object_of(jvm, "scala.None")
    number = _object_of(jvm, "org.apache.spark.sql.types.LongType")
    bytes_class = _class_of(jvm, "java.lang.Class").forName("org.apache.spark.unsafe.types.ByteArray")

    def call(eight: Any) -> Column:
        arguments = nothing.prepended(expressions.expression(eight._jc))  # noqa: SLF001
        # propagateNull=True, returnNullable=False, isDeterministic=True, scalarFunction=None.
        called = static_invoke(bytes_class, number, "getPrefix", arguments, nothing, True, False, True, none)
        return ClassicColumn(expressions.column(called))

    return call


# The plan of a micro batch. foreachBatch passes an RDD of whole rows: each job over it reads all columns and builds all
# rows. The plan that made this RDD is part of the running query. `column_pruned` uses it only if it consists of files,
# filters and projections, without state and randomness, and made the RDD that was passed. Otherwise the frame is used
# unchanged. Spark counts the rows of each operator for its own metrics: to read such a count takes some milliseconds,
# and no time for each row.
_RELATION: Final = "LogicalRelation"
_COLUMNAR: Final = frozenset({"ParquetFileFormat", "OrcFileFormat"})
_LENIENT: Final = "ignoreCorruptFiles"
_FORGETFUL: Final = "ignoreMissingFiles"
_STATELESS: Final = frozenset({"Project", "Filter"})
OUTPUT_ROWS: Final = "numOutputRows"
"""Spark's metric of the rows that an operator has put out."""

_AS_MANY_ROWS: Final = frozenset(
    {
        "WholeStageCodegenExec",
        "InputAdapter",
        "ProjectExec",
        "ArrowEvalPythonExec",
        "BatchEvalPythonExec",
        "EventTimeWatermarkExec",
    }
)
"""Operators that put out as many rows as they get, and have no such metric."""


def column_pruned(df: DataFrame) -> DataFrame:
    """A frame with the rows of a foreachBatch frame that reads only the columns used; `df` itself if that is
    impossible.

    Both frames give the same rows, but maybe in other Spark partitions. Rows that are read through the new frame do not
    count as input in the query's progress.
    """
    return asked(lambda: _replanned(df)) or df


class Readings:
    """How a foreachBatch frame is read twice.

    query_id: of the query whose foreachBatch this is, or None. narrow: for the columns that decide. whole: for the
    handler. Both are frames that read only the columns used, where that is sure to give the same rows; else the frame
    itself.
    """

    def __init__(self, df: DataFrame) -> None:
        use_driver_python(df.sparkSession)
        self.query_id = query_id_of(df.sparkSession)
        self.narrow = column_pruned(df)
        self._count_input = None if self.narrow is df else asked(lambda: _input_counter(df, self.narrow))
        self.whole = df if self._count_input is None else self.narrow
        self._df = df

    def fewer_than(self, rows: int, read_whole: Callable[[], Any]) -> bool:
        """Call `read_whole`; whether it read fewer than `rows` rows, as far as Spark tells."""
        if self._count_input is not None:
            read_whole()
            self._count_input(rows)
            return False
        rows_read = RowsRead(self._df)
        before = rows_read.count()
        read_whole()
        now = rows_read.count()
        return before is not None and now is not None and now - before < rows


def running_query(session: Any) -> Any:
    """Spark's object of the query whose foreachBatch calls this; None outside of foreachBatch."""
    query_id = query_id_of(session)
    if query_id is None:
        return None
    jvm = _jvm_of(session)
    running = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return running.get(_class_of(jvm, "java.util.UUID").fromString(query_id))


def _replanned(df: DataFrame) -> DataFrame | None:
    session: Any = df.sparkSession
    if is_persisted(df):
        return None
    query = running_query(session)
    if query is None or session.conf.get(f"spark.sql.files.{_LENIENT}") != "false":
        return None
    handed, execution = df._jdf.queryExecution().analyzed(), query.lastExecution()  # noqa: SLF001
    if class_name(handed) != "LogicalRDD" or not handed.rdd().equals(execution.toRdd()):
        return None
    jvm = _jvm_of(session)
    plan = execution.optimizedPlan()
    batch = _no_stream(plan, jvm) if plan.deterministic() else None
    if batch is None:
        return None
    datasets = _class_of(jvm, "org.apache.spark.sql.classic.Dataset")
    frame = datasets.ofRows(session._jsparkSession, batch)  # noqa: SLF001
    return DataFrame(frame, session)


def is_persisted(df: DataFrame) -> bool:
    """Whether somebody keeps the frame's rows for more than one reading."""
    level = df.storageLevel  # six calls into the JVM
    return level.useMemory or level.useDisk


def _gives_all(pruned: DataFrame) -> bool:
    if pruned.sparkSession.conf.get(f"spark.sql.files.{_FORGETFUL}") != "false":
        return False
    plan: Any = pruned._jdf.queryExecution().analyzed()  # noqa: SLF001 - Spark's own objects have no public access
    while class_name(plan) != _RELATION:
        if class_name(plan) != "Project":
            return False
        plan = plan.child()
    return _FORGETFUL.lower() not in plan.relation().options().mkString(",").lower()


def _input_counter(df: DataFrame, pruned: DataFrame) -> Callable[[int], Any] | None:
    """A function that adds a number of rows to the input in the query's progress, for rows read through `pruned`.

    None if that can't replace the frame: if it may have fewer rows when it is read again, because missing files are
    ignored, or if the frame does not have all rows of its files.
    """
    if not _gives_all(pruned) or pruned.schema != df.schema:
        return None
    leaves = running_query(df.sparkSession).lastExecution().executedPlan().collectLeaves()
    if leaves.size() != 1:
        return None
    metric: Any = leaves.head().metrics().apply(OUTPUT_ROWS)
    return lambda rows: asked(lambda: metric.add(rows))


def _no_stream(plan: Any, jvm: Any) -> Any:
    """The plan as a batch query over its files; None unless it consists of files, filters and projections."""
    if class_name(plan) == _RELATION:
        if not _reads_by_column(plan.relation()):
            return None
        return plan.copy(plan.relation(), plan.output(), plan.catalogTable(), False, plan.stream())
    if class_name(plan) not in _STATELESS:
        return None
    child = _no_stream(plan.child(), jvm)
    if child is None:
        return None
    return plan.withNewChildren(_object_of(jvm, "scala.collection.immutable.Nil").prepended(child))


def _reads_by_column(relation: Any) -> bool:
    return (
        class_name(relation) == "HadoopFsRelation"
        and class_name(relation.fileFormat()) in _COLUMNAR
        and _LENIENT.lower() not in relation.options().mkString(",").lower()
    )


class RowsRead:
    """The number of rows that were read from a foreachBatch frame so far, by all jobs."""

    def __init__(self, df: DataFrame) -> None:
        self._metric: Any = None
        # A persisted frame is not read through its plan again, so its metric does not rise.
        if not is_persisted(df):
            self._metric = asked(lambda: _counter(df))

    def count(self) -> int | None:
        """All rows that the batch's plan has put out, in all readings together; None if that is unknown."""
        return None if self._metric is None else asked(lambda: int(self._metric.value()))


def _counter(df: DataFrame) -> Any:
    query = running_query(df.sparkSession)
    if query is None:
        return None
    node = query.lastExecution().executedPlan()
    while not node.metrics().contains(OUTPUT_ROWS):
        if node.getClass().getSimpleName() not in _AS_MANY_ROWS:
            return None
        node = node.children().head()
    return node.metrics().apply(OUTPUT_ROWS)


JAVA_MIN: Final = 17


def java_version(banner: str) -> int | None:
    """The feature release that `java -version` prints (17 for 17.0.15, 8 for 1.8.0), or None."""
    found = re.search(r'version "(?:1\.)?(\d+)', banner)
    return int(found[1]) if found else None


def require_java() -> None:
    """Raise SparkUnfit unless Spark will find a Java that is new enough: $JAVA_HOME first, then the PATH."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"Spark needs Java {JAVA_MIN} or newer (OpenJDK will do): install it, or point JAVA_HOME at one"
    if program is None or shutil.which(program) is None:
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise SparkUnfit(f"{where}; {advice}")
    printed = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)  # noqa: S603 - Java itself
    version = java_version(printed.stderr + printed.stdout)
    if version is None or version < JAVA_MIN:
        raise SparkUnfit(f"{program} is {f'Java {version}' if version else 'of an unknown version'}; {advice}")


@contextmanager
def session_of(name: str, conf: Mapping[str, str], *, debug: bool) -> Iterator[SparkSession]:
    """The active session, left running; else one of the job's own, stopped at the end."""
    ours = SparkSession.getActiveSession() is None
    builder = SparkSession.builder.appName(f"pushrep-{name}")
    # A job needs no web pages of its plans; --conf may say otherwise.
    for setting, value in {"spark.ui.showConsoleProgress": "false", **conf}.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    try:
        if not debug:
            spark.sparkContext.setLogLevel("OFF")
        yield spark
    finally:
        if ours:
            spark.stop()  # its JVM must not outlive the job
