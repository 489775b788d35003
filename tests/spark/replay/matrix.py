"""`make matrix`: runs each release, form, carrier and sink, with a kill and a restart, judges it by SQL, and writes a
table into docs/spark.md.

python -m tests.spark.replay.matrix <directory of Pythons> all|pairwise|missing <release> ...

One topic holds records of three producers with many replays, each with its metadata in the key, in a header and as a
position in the value. Without a connector for a release its cells read files of the same records. A cell is `shown` if
its sink holds what SQL says after a kill -9 in the second of two batches; else why not stands below the table. The page
is written after each cell; what it shows of cells that are not run stays. Pairwise: of each form and sink one carrier,
another one in each release, so that each two of release, form, carrier and sink meet. Missing: what the page does not
show yet.
"""

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from filtering import METADATA_HEADER, StreamMetadata
from tests.kafka.cluster import KafkaCluster
from tests.kafka.plain_client import consume_all, create_topic, plain_producer
from tests.postgresql import running_server
from tests.spark_programs import WORKERS_PYTHON, kill_session

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "spark.md"
PROGRAM = Path(__file__).with_name("matrix_program.py")
BEGIN, END = "<!-- begin of what make matrix writes -->", "<!-- end of what make matrix writes -->"
SINKS = ("path", "sqlite", "postgresql", "delta", "iceberg", "topic")
HEADS = ("a path (Parquet)", "SQLite", "PostgreSQL", "Delta", "Iceberg", "a topic")
FORMS = {"foreachBatch": SINKS[:-1], "operator": ("path", "delta", "iceberg"), "relay": ("topic",)}
"""And the sinks that a form has."""
CARRIERS = ("key", "header", "position")
RELAY = ("relay", "key", "topic")
EVERY = [(form, carrier, sink) for form in ("foreachBatch", "operator") for carrier in CARRIERS for sink in FORMS[form]]
EVERY.append(RELAY)
BATCH, BATCHES, PARTITIONS = 60, 2, 2
BOUND_S = 1800
"""For each answer of a program: a busy machine may want as long."""


def main(pythons, how, *releases):
    wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="pushrep-matrix-") as home,
        running_server() as postgresql,
        KafkaCluster(Path(home) / "broker") as broker,
    ):
        log = Log(broker.bootstrap_servers, Path(home) / "files")
        for release in releases:
            began_s, python = time.monotonic(), Path(pythons).absolute() / release / "bin" / "python"
            cells, found = Release(python, release, Path(home), log, postgresql), shown_in_the_page(release)
            for cell, answer in cells.run(how, shown=frozenset(found)):
                found[cell] = answer
                write(release, cells.source, found)
                print(release, *cell, answer, flush=True)  # noqa: T201 - how far it is
            wrong += list(found.values()).count("WRONG")
            print(release, f"{time.monotonic() - began_s:.0f} s", flush=True)  # noqa: T201 - its report
    return 1 if wrong else 0


class Log:
    """The records, in a topic (without servers in none) and in files, a file a batch; and which of them SQL keeps."""

    def __init__(self, servers, files, batches=BATCHES):
        self.servers, self.topic, self.files, self._batches = servers, "matrix", files, batches
        rng = random.Random(16)
        self.rows = []  # partition, offset, producer, source offset
        for partition in range(PARTITIONS):
            at = dict.fromkeys(range(3), 0)
            for offset in range(BATCH * batches // PARTITIONS):
                producer = rng.randrange(3)
                if rng.random() < 0.15:
                    at[producer] = max(0, at[producer] - rng.randint(1, 9))
                self.rows.append((partition, offset, producer, at[producer]))
                at[producer] += 1
        self.kept = kept_by_sql(self.rows)
        assert len(self.rows) // 5 < len(self.kept) < len(self.rows) * 5 // 6, "some of each"
        first = [place for place in self.kept if place[1] < BATCH // PARTITIONS]
        self.between_batches = [], first, self.kept
        """What a sink may hold between a kill and the next start."""
        if servers is not None:
            self._fill_topic()
        self._fill_files()

    def _fill_topic(self):
        create_topic(self.servers, self.topic, partitions=PARTITIONS)
        producer = plain_producer(self.servers)
        for row in self.rows:
            key, value, headers = carried(row)
            producer.produce(self.topic, key=key, value=value, headers=headers, partition=row[0])
        assert producer.flush(120) == 0

    def _fill_files(self):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.files.mkdir()
        each = BATCH // PARTITIONS
        for batch in range(self._batches):
            rows = [row for row in self.rows if batch * each <= row[1] < (batch + 1) * each]
            cells = [(*carried(row), self.topic, row[0], row[1]) for row in rows]
            keys, values, headers, topics, partitions, offsets = zip(*cells, strict=True)
            struct = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            named = [[{"key": name, "value": value} for name, value in own] for own in headers]
            columns = {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "topic": pa.array(topics),
                "partition": pa.array(partitions, pa.int32()),
                "offset": pa.array(offsets, pa.int64()),
                "headers": pa.array(named, struct),
            }
            pq.write_table(pa.table(columns), path := self.files / f"{batch}.parquet")
            os.utime(path, (1_700_000_000 + batch,) * 2)

    def source(self, *, has_connector):
        """For the program: how to read the source, and the offset from which rows are of the second batch."""
        options = {"path": str(self.files), "maxFilesPerTrigger": "1"}
        if has_connector:
            options = {"kafka.bootstrap.servers": self.servers, "subscribe": self.topic, "includeHeaders": "true"}
            options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(BATCH)}
        return {"format": "kafka" if has_connector else "parquet", "options": options, "cut": BATCH // PARTITIONS}


def carried(row):
    """Key, value and headers of a record: its metadata thrice."""
    partition, offset, producer, source = row
    key = StreamMetadata(producer - 1, partition, source).pack()
    at = {"producer": f"p{producer}", "file": source // 7, "row": source % 7}
    return key, json.dumps({"at": at, "id": [partition, offset]}).encode(), [(METADATA_HEADER, key)]


def kept_by_sql(rows):
    """The rule as SQL has it, of rows (log partition, log offset, producer, source offset): the first two of each."""
    with sqlite3.connect(":memory:") as judge:
        judge.execute("create table log (partition, place, producer, source)")
        judge.executemany("insert into log values (?, ?, ?, ?)", rows)
        before = "partition by partition, producer order by place rows between unbounded preceding and 1 preceding"
        before = f"select *, max(source) over ({before}) before from log"
        kept = judge.execute(f"select partition, place from ({before}) where before is null or source > before")
        return sorted(map(list, kept))


class Release:
    """All cells of one release."""

    def __init__(self, python, release, home, log, postgresql):
        self._python, self._release, self._log, self._postgresql = python, release, log, postgresql
        self._place = home / release
        self._place.mkdir()
        self._relayed = f"relayed-{release}"
        self.stopped_behind = {}
        """Of the cells that name a write: which one it was."""
        minor = release.rpartition(".")[0]
        own = ROOT / ".cache" / ("spark-kafka/libs" if minor == "4.2" else f"spark-tables/{minor}")
        self._jars = sorted(map(str, own.glob("*.jar")))
        self._has_connector = log.servers is not None and any("spark-sql-kafka" in jar for jar in self._jars)
        self._has_tables = any("iceberg" in jar for jar in self._jars)

    @property
    def source(self):
        """The source of its cells."""
        return "topic" if self._has_connector else "files"

    def run(self, how, shown):
        """Run the cells, and yield each result when it is there: (form, carrier, sink), and `shown` or why not."""
        yield from ((cell, why) for cell in EVERY if (why := self.lacks(cell[2])) is not None)
        cells = [cell for cell in EVERY if self.lacks(cell[2]) is None and not (how == "missing" and cell in shown)]
        if how == "pairwise":
            turn = int(self._release.split(".")[1])  # 5, 0, 1, 2, 3
            chosen = {
                (form, sink): CARRIERS[(n + turn) % 3] for n, (form, sink) in enumerate(sorted({c[::2] for c in cells}))
            }
            cells = [cell for cell in cells if chosen[cell[::2]] == cell[1] or cell == RELAY]
        if cells:
            yield from self.through(cells)

    def lacks(self, sink):
        """Why nothing can go into this sink; None if it can."""
        if sink == "topic" and not self._has_connector:
            return "Maven has no Kafka connector for this release"
        if sink in {"delta", "iceberg"} and not self._has_tables:
            return "Maven has no jar of it for this release"
        return None

    def through(self, cells):
        """The same of these cells, which may name the write that each stops behind (matrix_program.py)."""
        for cell in cells:
            if cell[2] == "topic":
                create_topic(self._log.servers, relayed(self._relayed, cell), partitions=PARTITIONS)
        told = {
            "cells": cells,
            "jars": self._jars,
            "tables": self._has_tables,
            "source": self._log.source(has_connector=self._has_connector),
            "postgresql": f"{self._postgresql}",
            "relayed": self._relayed,
        }
        with self._start({**told, "mode": "first"}) as first:
            line = next_line(first, BOUND_S)
        if line is None:
            why = f"did not come into its second batch: {last_line(self._place / 'program.err')}"
            yield from ((cell, why) for cell in cells)
            return
        yield from ((tuple(name.split("/")), why) for name, why in line["failed"].items())
        self.stopped_behind = {tuple(name.split("/")): write for name, write in line["waits"].items()}
        left = list(self.stopped_behind)
        late = [cell for cell in cells if cell not in left and "/".join(cell) not in line["failed"]]
        if left:
            late += yield from self._again(left, told)
        yield from ((cell, "did not come to its end in time") for cell in late)

    def _again(self, left, told):
        """Check the final content of the sink of each killed cell; returns the cells that did not reach the kill."""
        with self._start({**told, "cells": left, "mode": "again"}) as then:
            while (line := next_line(then, BOUND_S)) is not None:
                left.remove(cell := tuple(line["cell"].split("/")))
                rows = self._rows_relayed(cell) if cell[2] == "topic" else line.get("rows")
                right = rows == self._log.kept and line.get("seen") in self._log.between_batches
                said = "shown" if right else line.get("error") or "WRONG"
                if right and line["failed"]:
                    said = f"shown by a second start; the first: {line['failed']}"
                yield cell, said
        return left

    @contextmanager
    def _start(self, told):
        """The program; killed at the end, however it ends."""
        own = {"PYTHONPATH": str(ROOT), "SPARK_LOCAL_DIRS": str(self._place / "scratch"), "SPARK_LOCAL_IP": "127.0.0.1"}
        own |= {"PYSPARK_PYTHON": WORKERS_PYTHON, "PUSHREP_TESTS_PYTHON": str(self._python)}
        own |= {"PYSPARK_SUBMIT_ARGS": "--driver-memory 2g pyspark-shell"}
        with (self._place / "program.err").open("a") as errors:
            program = subprocess.Popen(
                [str(self._python), str(PROGRAM), str(self._place), json.dumps(told)],
                env=os.environ | own,
                cwd=self._place,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        with program:
            try:
                yield program
            finally:
                kill_session(program)

    def _rows_relayed(self, cell):
        """The source positions of the records that a filtering reader sees in the relay's topic."""
        rows, ids = [], {}
        topic = relayed(self._relayed, cell)
        for partition, records in consume_all(self._log.servers, topic, range(PARTITIONS)).items():
            for record in records:
                key = StreamMetadata.unpack(record.key)
                rows.append((partition, record.offset, (key.pid, key.partition), key.offset))
                ids[partition, record.offset] = json.loads(record.value)["id"]
        numbers = {pair: n for n, pair in enumerate(dict.fromkeys(row[2] for row in rows))}
        kept = kept_by_sql([(*row[:2], numbers[row[2]], row[3]) for row in rows])
        return sorted(ids[tuple(where)] for where in kept)


def relayed(name, cell):
    """The topic of a relay's cell: each write has its own."""
    return "-".join([name, *cell[3:]])


def next_line(process, bound_s):
    """The next JSON line of its output; None at its end, or when the time is over."""
    found = []

    def read():
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(bound_s)
    return found[0] if found else None


def last_line(path):
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def shown_in_the_page(release):
    """The cells of a release on the page, each with its text."""
    text, shown = DOCS.read_text(encoding="utf-8"), {}
    said = re.search(rf"^- {re.escape(release)}, every cell: `(shown .*)`$", text, re.MULTILINE)
    for line in text.splitlines():
        if line.startswith(f"| {release} |"):
            _, _, _, form, carrier, *answers = (cell.strip() for cell in line.split("|"))
            sinks = (sink for sink, answer in zip(SINKS, answers, strict=False) if answer == "shown")
            shown |= {(form, carrier, sink): said[1] if said else "shown" for sink in sinks}
    return shown


def write(release, source, found):
    """Put what was seen of a release into the page; other releases stay as they were."""
    head, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    old, _, tail = rest.partition(END)
    lines = defaultdict(list)
    for line in old.splitlines():
        if named := re.match(r"(?:\| |- )(\d+\.\d+\.\d+)\b", line):
            lines[named[1]].append(line)
    lines[release] = list(lines_of(release, source, found))
    table = [f"| Spark | source | form | carrier | {' | '.join(HEADS)} |", "|---" * (4 + len(SINKS)) + "|"]
    in_order = sorted(lines, key=lambda one: tuple(map(int, one.split("."))))
    table += [line for one in in_order for line in lines[one] if line.startswith("|")]
    why = [line for one in in_order for line in lines[one] if line.startswith("-")]
    DOCS.write_text("\n".join([head + BEGIN, "", *table, "", *why, *[""][: len(why)], END + tail]), encoding="utf-8")


def lines_of(release, source, found):
    """The rows of one release, and a line for each reason why cells are not shown at once."""
    for form, possible in FORMS.items():
        for carrier in ("key",) if form == "relay" else CARRIERS:
            answers = [found.get((form, carrier, sink), "not shown") for sink in SINKS]
            said = [answer[:5] if answer[:5] in {"shown", "WRONG"} else "not shown" for answer in answers]
            cells = [one if sink in possible else "" for sink, one in zip(SINKS, said, strict=True)]
            yield f"| {release} | {source} | {form} | {carrier} | {' | '.join(cells)} |"
    reasons = defaultdict(list)
    for cell in EVERY:
        if (answer := plain(found.get(cell, "shown"))) != "shown":
            reasons[answer].append(cell)
    for answer, cells in reasons.items():
        yield f"- {release}, {together(cells, set(found))}: `{answer.replace('`', '')}`"


def plain(answer):
    """The text of a failure without the parts that differ between equal failures: numbers of queries, and the first
    reporter.
    """
    answer = re.sub(r"Query \[id = .*?\]", "Query", answer)
    return re.sub(r"(?<=: )(?:error|\w*Exception): |\[[A-Z_.]+\] | SQLSTATE: \w+", "", answer)


def together(cells, ran):
    """Cells in few words: all that were run, all of a sink, or one by one."""
    if set(cells) == ran:
        return "every cell"
    sinks = [sink for sink in SINKS if any(cell[2] == sink for cell in cells)]
    if set(cells) == {cell for cell in EVERY if cell[2] in sinks}:
        return " and ".join(HEADS[SINKS.index(sink)] for sink in sinks)
    return "; ".join(map(", ".join, cells))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
