"""The apply job, killed by SIGKILL at one step of replacing rows: python repair_program.py <options, JSON> <step>"""

import functools
import json
import os
import signal
import sys

STEPS = {
    "path": {
        "asked": ("DirectoryTable", "replace", "before", 1),
        "others written aside": ("DirectoryTable", "_write_aside", "after", 1),
        "all written aside": ("HadoopDirectory", "rename", "before", 1),
        "decided": ("DirectoryTable", "_finish_replacing", "before", 1),
        "one of them in place": ("DirectoryTable", "_into_place", "after", 1),
        "all in place": ("FileMarks", "write", "before", 1),
        "marks stored": ("FileMarks", "write", "after", 1),
    },
    "database": {
        "asked": ("SqlTable", "replace", "before", 1),
        "staged": ("SqlTable", "replace", "after", 1),
        "in the transaction": ("SqlTable", "_commit", "after", 1),
        "committed": ("SqlTable", "write", "after", 1),
    },
}
"""Per kind of table: class, method, before or after its so manieth call from the first `replace` on."""


def die_at(kind, step, die, setattr=setattr):  # noqa: A002 - a test's takes it back
    """`die` is called at this step."""
    from spark_jobs.file_marks import FileMarks
    from spark_jobs.sinks.directory_table import DirectoryTable
    from spark_jobs.sinks.hadoop import HadoopDirectory
    from spark_jobs.sql import SqlTable

    classes = {one.__name__: one for one in (FileMarks, HadoopDirectory, DirectoryTable, SqlTable)}
    name, method, when, nth = STEPS[kind][step]
    calls = {"replace": 0, "dying": 0}

    def counted(function):
        @functools.wraps(function)
        def replace(*args, **named):
            calls["replace"] += 1
            return function(*args, **named)

        return replace

    def dying(function):
        @functools.wraps(function)
        def call(*args, **named):
            # The marks before the first of these batches are stored before it is handled.
            calls["dying"] += calls["replace"] > 0 or method == "replace"
            if when == "before" and calls["dying"] == nth:
                die()
            found = function(*args, **named)
            if calls["dying"] == nth:
                die()
            return found

        return call

    setattr(classes[name], method, dying(getattr(classes[name], method)))
    table = DirectoryTable if kind == "path" else SqlTable
    setattr(table, "replace", counted(table.replace))


def main(given, step):
    from spark_jobs.jobs import pipeline
    from spark_jobs.jobs.command import Reporter
    from spark_jobs.jobs.options import ApplyOptions

    options = json.loads(given)
    die_at("database" if options.get("sink_table") else "path", step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    options["keep"] = tuple(options["keep"])
    with Reporter.open("-") as reporter:
        pipeline.apply(ApplyOptions(**options), reporter)


if __name__ == "__main__":
    main(*sys.argv[1:])
