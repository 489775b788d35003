"""Where a query's driver writes, in the order of a sink's points; what tasks write belongs to the write that waits.

a path            a file: owners · removed, rows aside, removed, renamed: a batch
a catalog table   CREATE · ALTER (a partition dropped), INSERT: a batch of files · made, rows: Delta, Iceberg
a database        each statement that changes it, each COMMIT
a topic           a file: the pin · sent: a batch
marks             marks: FileMarks · with the rows in a database
a file            file aside, renamed, removed: what is left aside, if anything is
"""

import functools
import importlib
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

CALLS = {
    "spark_jobs.sinks.hadoop.HadoopDirectory": {"_write": "file aside", "rename": "renamed", "remove": "removed"},
    "spark_jobs.sinks.directory_table.DirectoryTable": {"_write_aside": "rows aside"},
    "spark_jobs.file_marks.FileMarks": {"write": "marks"},
    "spark_jobs.jobs.relaying.Sending": {"send": "sent"},
    "pyspark.sql.readwriter.DataFrameWriterV2": {"create": "made", "overwrite": "rows"},
}
CHANGES = ("ALTER", "CREATE", "DELETE", "INSERT")
"""First words of statements."""


@contextmanager
def behind_each_write(act):
    """`act(what)` is called behind each write of this process."""

    def reached(what, function):
        @functools.wraps(function)
        def call(*given, **named):
            result = function(*given, **named)
            act(what)
            return result

        return call

    def sql(session, statement, *given, run, **named):
        result = run(session, statement, *given, **named)
        if (word := first_word(statement)) in CHANGES:
            act(word)
        return result

    with ExitStack() as patches:

        def replace(place, name, changed):
            module, _, owner = place.rpartition(".")
            found = getattr(importlib.import_module(module), owner)
            patches.enter_context(patch.object(found, name, changed(getattr(found, name))))

        for place, methods in CALLS.items():
            for name, what in methods.items():
                replace(place, name, functools.partial(reached, what))
        replace("pyspark.sql.session.SparkSession", "sql", lambda run: functools.partialmethod(sql, run=run))
        for name in ("PostgreSQL", "SQLite"):
            place = f"spark_jobs.sql.{name}"
            replace(place, "connect", lambda connect: lambda dialect: _Connection(connect(dialect), act))
        yield


def first_word(statement):
    return statement.split(maxsplit=1)[0]


class _Wrapped:
    def __init__(self, inner, act):
        self._inner, self._act = inner, act

    def __getattr__(self, name):
        return getattr(self._inner, name)


class _Connection(_Wrapped):
    """The driver's to a database. Tasks have their own, made in their own processes."""

    is_changed = False

    def cursor(self):
        return _Cursor(self._inner.cursor(), self.executed)

    def executed(self, statement):
        if (word := first_word(statement)) in CHANGES:
            self.is_changed = True
            self._act(word)

    def commit(self):
        self._inner.commit()
        if self.is_changed:
            self._act("COMMIT")


class _Cursor(_Wrapped):
    def execute(self, statement, *values):
        self._inner.execute(statement, *values)
        self._act(statement)
