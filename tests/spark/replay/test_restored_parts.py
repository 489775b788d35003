"""What a restore of some parts of a query leaves: each cell of the table in docs/spark.md, judged by SQL.

old   after two batches of four     new   after all four     then some parts are the old copies, the others the new
                                                             ones; a record comes, and the query is started again
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyspark.errors import StreamingQueryException

from filtering import StreamMetadata
from pushrep.log import SegmentLog
from spark_jobs import FileMarks, ReplayFilteredBatches, idempotent_table, register_sources
from spark_jobs.sql import SqlTable
from tests.postgresql import new_database

pytestmark = pytest.mark.spark

DOCS = Path(__file__).parents[3] / "docs" / "spark.md"
BATCH = 3
OLD, NEW = [0, 1, 2, 1, 2, 3], [3, 4, 5, 2, 5, 6]
"""The source offsets of the records; each batch but the first repeats some of the one before."""
SHORT = {("a path", parts) for parts in ("table", "checkpoint", "table, checkpoint", "checkpoint, marks, log")}
SHORT |= {("SQLite", "checkpoint"), ("SQLite", "log")}


def cells():
    """(kind of sink, parts that are old, what happens), each cell that the page fills."""
    head, _, *lines = DOCS.read_text(encoding="utf-8").split("| older than the rest |")[1].split("\n\n")[0].splitlines()
    kinds = [kind.strip() for kind in head.strip("| ").split("|")]
    for line in lines:
        parts, *told = (cell.strip(" `") for cell in line.strip("|").split("|"))
        yield from ((kind, parts, what) for kind, what in zip(kinds, told, strict=True) if what)


HERE = [cell for cell in cells() if cell[0] != "Delta"]
"""Delta's: test_releases.py."""


class Query:
    """Log, checkpoint, table and marks, each in a directory or file of its own; PostgreSQL has the latter two."""

    def __init__(self, spark, place, kind, url=None):
        self.spark, self.place, self.kind = spark, place, kind
        self.url = f"sqlite:{place}/table" if kind == "SQLite" else url

    def append(self, sources):
        with SegmentLog.open(self.place / "log" / "orders-0") as log:
            first = log.log_end_offset
            values = [b"%d of %d" % (first + n, len(sources)) for n in range(len(sources))]
            log.append(values, keys=[StreamMetadata(7, 0, n).pack() for n in sources])

    def run(self):
        if self.url is None:
            sink, marks = idempotent_table(str(self.place / "table")), FileMarks(self.place / "marks")
        else:
            sink = marks = SqlTable(self.url, "orders")
        options = {"path": str(self.place / "log"), "topic": "orders", "maxRecordsPerTrigger": str(BATCH)}
        rows = self.spark.readStream.format("pushrep").options(**options).load()
        rows = rows.select("key", "topic", "partition", "offset", "value")
        writer = rows.writeStream.foreachBatch(ReplayFilteredBatches(sink, marks))
        writer = writer.option("checkpointLocation", str(self.place / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    def table(self):
        if self.url is None:
            rows = self.spark.read.parquet(f"{self.place}/table").select("offset", "value").collect()
            return [(n, bytes(value)) for n, value in rows]
        if self.kind == "SQLite":
            with closing(sqlite3.connect(self.place / "table")) as database:
                return [(n, bytes(value)) for n, value in database.execute('select "offset", value from orders')]
        import psycopg

        with psycopg.connect(self.url) as connection:
            return [(n, bytes(value)) for n, value in connection.execute('select "offset", value from orders')]

    def differs(self):
        """The records that the rule keeps of the log and the table does not hold once, and rows that it has besides."""
        with SegmentLog.open_reader(self.place / "log" / "orders-0") as log:
            records = [(one.offset, StreamMetadata.unpack(one.key).offset, one.value) for one in log.records(0)]
        with closing(sqlite3.connect(":memory:")) as judge:
            judge.execute("create table log (place, source, value)")
            judge.execute("create table found (place, value)")
            judge.executemany("insert into log values (?, ?, ?)", records)
            judge.executemany("insert into found values (?, ?)", self.table())
            before = "max(source) over (order by place rows between unbounded preceding and 1 preceding)"
            return judge.execute(
                f"""with kept as (select place, value from (select *, {before} before from log)
                        where before is null or source > before),
                    counted as (select place, value, 1 wanted, 0 held from kept
                        union all select place, value, 0, 1 from found)
                    select place, value, sum(wanted), sum(held) from counted group by place, value
                    having sum(wanted) <> sum(held)"""
            ).fetchall()


@pytest.fixture(scope="module")
def ages(spark, tmp_path_factory):
    """kind -> the place with the old and the new copy of each part; made when first asked for."""
    register_sources(spark)
    made = {}

    def of(kind, new_url):
        if kind not in made:
            place = tmp_path_factory.mktemp("ages")
            url = new_url("building") if kind == "PostgreSQL" else None
            query = Query(spark, place / "building", kind, url)
            for age, sources in (("old", OLD), ("new", NEW)):
                query.append(sources)
                query.run()
                assert query.differs() == []
                shutil.copytree(place / "building", place / age)
                if url is not None:
                    new_url(age, template="building")
            made[kind] = place
        return made[kind]

    return of


@pytest.fixture
def new_url(request):
    """(name, template) -> the URL of a new database in the server."""

    def make(name, template=None):
        import psycopg

        server = request.getfixturevalue("postgresql")
        name = f"restores_{name}"
        if template is None:
            return new_database(server, name)
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE restores_{template}")
        return urlsplit(server)._replace(path=f"/{name}").geturl()

    return make


@pytest.mark.parametrize(
    ("kind", "old", "told"),
    [
        pytest.param(*cell, id=": ".join(cell[:2]), marks=[] if cell[:2] in SHORT else [pytest.mark.long])
        for cell in HERE
    ],
)
def test_faults_f7_each_record_once_or_refused_by_name(spark, ages, new_url, tmp_path, kind, old, told):
    old = old.split(", ")
    place = ages(kind, new_url)
    query = Query(spark, tmp_path / "query", kind)
    query.place.mkdir()
    for part in ("log", "checkpoint", "table", "marks"):
        if (copy := place / ("old" if part in old else "new") / part).is_dir():
            shutil.copytree(copy, query.place / part)
        elif copy.exists():
            shutil.copy(copy, query.place / part)
    if kind == "PostgreSQL":
        query.url = new_url("_".join(old), template="old" if "table" in old else "new")
    before = sorted(query.table())
    query.append([7])
    if told == "goes on":
        query.run()
        assert query.differs() == []
    else:
        with pytest.raises(StreamingQueryException, match=told):
            query.run()
        assert sorted(query.table()) == before, "a refusal changes nothing"
