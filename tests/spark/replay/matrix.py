"""`make matrix`: each release, form, carrier and sink, killed and run again, judged by SQL; a table in docs/spark.md.

python -m tests.spark.replay.matrix <directory of Pythons> all|pairwise|relay <release> ...


One topic holds records of three producers with many replays, each with its metadata in the key, in a header and as a
position in the value. Without a connector for a release its cells read files of the same records. A cell is `shown` if
its sink holds what SQL says after a kill -9 in the second of two batches; else why not stands below the table. A
release's lines are written when it is done, and what was not run stays as it was. Pairwise: of each form and
sink one carrier, another one in each release, so that each two of release, form, carrier and sink meet.
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
from pathlib import Path

from filtering import METADATA_HEADER, StreamMetadata
from tests.kafka.cluster import KafkaCluster
from tests.kafka.plain_client import consume_all, create_topic, plain_producer
from tests.postgresql import running_server
from tests.spark_programs import kill_session

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "spark.md"
PROGRAM = Path(__file__).with_name("matrix_program.py")
BEGIN, END = "<!-- begin of what make matrix writes -->", "<!-- end of what make matrix writes -->"
SINKS = ("path", "sqlite", "postgresql", "delta", "iceberg", "topic")
HEADS = ("a path (Parquet)", "SQLite", "PostgreSQL", "Delta", "Iceberg", "a topic")
FORMS = {"foreachBatch": SINKS[:-1], "operator": ("path", "delta", "iceberg"), "relay": ("topic",)}
"""And the sinks that a form has."""
SOURCE = ("source", "", "")
CARRIERS = ("key", "header", "position")
BATCH, BATCHES, PARTITIONS = 60, 2, 2
BOUND_S = 420


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
            found = Release(python, release, Path(home), log, postgresql).run(how)
            wrong += list(found.values()).count("WRONG")
            write(release, found)
            print(release, f"{time.monotonic() - began_s:.0f} s", found, flush=True)  # noqa: T201 - its report
    return 1 if wrong else 0


class Log:
    """The records, in a topic and in files, a file a batch; and which of them SQL keeps."""

    def __init__(self, servers, files):
        self.servers, self.topic, self.files = servers, "matrix", files
        rng = random.Random(16)
        self.rows = []  # partition, offset, producer, source offset
        for partition in range(PARTITIONS):
            at = dict.fromkeys(range(3), 0)
            for offset in range(BATCH * BATCHES // PARTITIONS):
                producer = rng.randrange(3)
                if rng.random() < 0.15:
                    at[producer] = max(0, at[producer] - rng.randint(1, 9))
                self.rows.append((partition, offset, producer, at[producer]))
                at[producer] += 1
        self.kept = kept_by_sql(self.rows)
        assert len(self.rows) // 3 < len(self.kept) < len(self.rows) * 5 // 6, "some of each"
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
        for batch in range(BATCHES):
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
        """For the program: how to read it, and from which offset on a row is of the second batch."""
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
        minor = release.rpartition(".")[0]
        own = ROOT / ".cache" / ("spark-kafka/libs" if minor == "4.2" else f"spark-tables/{minor}")
        self._jars = sorted(map(str, own.glob("*.jar")))
        self._has_connector = any("spark-sql-kafka" in jar for jar in self._jars)
        self._has_tables = any("iceberg" in jar for jar in self._jars)

    def run(self, how):
        """(form, carrier, sink) → shown, or why not."""
        found = {}
        sinks = [sink for sink in FORMS["foreachBatch"] if self._has_tables or sink not in {"delta", "iceberg"}]
        cells = [("foreachBatch", carrier, sink) for carrier in CARRIERS for sink in sinks]
        cells += [("operator", carrier, sink) for carrier in CARRIERS for sink in sinks if sink in FORMS["operator"]]
        if how == "pairwise":
            turn = int(self._release.split(".")[1])  # 5, 0, 1, 2, 3
            chosen = {
                (form, sink): CARRIERS[(n + turn) % 3] for n, (form, sink) in enumerate(sorted({c[::2] for c in cells}))
            }
            cells = [cell for cell in cells if chosen[cell[::2]] == cell[1]]
        found = {} if how == "relay" else self._through(cells)
        found["relay", "key", "topic"] = self._relayed() if self._has_connector else "no Kafka connector"
        return {SOURCE: "topic" if self._has_connector else "files", **found}

    def _through(self, cells):
        told = {
            "cells": cells,
            "jars": self._jars,
            "tables": self._has_tables,
            "source": self._log.source(has_connector=self._has_connector),
            "postgresql": f"{self._postgresql}",
        }
        found = dict.fromkeys(cells, "did not come to its end in time")
        first = self._start({**told, "mode": "first"})
        try:
            line = next_line(first, BOUND_S)
        finally:
            kill_session(first)
        if line is None:
            return dict.fromkeys(cells, f"did not come into its second batch: {last_line(self._place / 'program.err')}")
        for name, why in line["failed"].items():
            found[tuple(name.split("/"))] = why
        left = [tuple(name.split("/")) for name in line["waits"]]
        if not left:
            return found
        then = self._start({**told, "cells": left, "mode": "again"})
        try:
            while (line := next_line(then, BOUND_S)) is not None:
                right = line.get("rows") == self._log.kept
                said = "shown" if right else line.get("error") or "WRONG"
                if right and line["failed"]:
                    said = f"shown by a second start; the first: {line['failed']}"
                found[tuple(line["cell"].split("/"))] = said
                print(self._release, line["cell"], said, flush=True)  # noqa: T201 - how far it is
        finally:
            kill_session(then)
        return found

    def _start(self, told):
        return self._process([self._python, PROGRAM, self._place, json.dumps(told)], "program")

    def _process(self, command, name):
        own = {"PYTHONPATH": str(ROOT), "SPARK_LOCAL_DIRS": str(self._place / "scratch"), "SPARK_LOCAL_IP": "127.0.0.1"}
        own |= {"PYSPARK_PYTHON": str(self._python), "PYSPARK_SUBMIT_ARGS": "--driver-memory 2g pyspark-shell"}
        with (self._place / f"{name}.err").open("a") as errors:
            return subprocess.Popen(
                list(map(str, command)),
                env=os.environ | own,
                cwd=self._place,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def _records(self, topic):
        """(partition, record) of all in a topic."""
        found = consume_all(self._log.servers, topic, range(PARTITIONS))
        return [(partition, record) for partition, records in found.items() for record in records]

    def _relayed(self):
        """The relay job into a topic of its own, killed once some records are there; read through the rule again."""
        servers, topic = self._log.servers, f"relayed-{self._release}"
        create_topic(servers, topic, partitions=PARTITIONS)
        command = [self._python, "-m", "spark_jobs.jobs.relay", "--source", "kafka"]
        command += ["--source-option", f"kafka.bootstrap.servers={servers}", "--topic", self._log.topic]
        command += ["--to-servers", servers, "--to-topic", topic, "--application", "matrix"]
        command += ["--checkpoint", self._place / "relay-checkpoint", "--max-records-per-trigger", BATCH]
        command += ["--trigger", "available-now", "--conf", f"spark.jars={','.join(self._jars)}"]
        command += ["--conf", "spark.master=local[2]", "--conf", "spark.sql.shuffle.partitions=1"]
        command += ["--source-option", "startingOffsets=earliest"]
        job = self._process(command, "relay")
        until_s = time.monotonic() + BOUND_S
        while not (there := self._records(topic)) and job.poll() is None and time.monotonic() < until_s:
            time.sleep(0.1)
        kill_session(job)
        if not there or len(there) >= len(self._log.kept):
            return f"was not killed on its way ({len(there)} records): {last_line(self._place / 'relay.err')}"
        failed = []  # a second start, as a cell has, too: Spark 4.1 wants it
        while (why := self._relay_to_its_end(command)) is not None:
            if failed:
                return why
            failed.append(why)
        rows, ids = [], {}
        for partition, record in self._records(topic):
            key = StreamMetadata.unpack(record.key)
            rows.append((partition, record.offset, (key.pid, key.partition), key.offset))
            ids[partition, record.offset] = json.loads(record.value)["id"]
        numbers = {pair: n for n, pair in enumerate(dict.fromkeys(row[2] for row in rows))}
        kept = kept_by_sql([(*row[:2], numbers[row[2]], row[3]) for row in rows])
        right = sorted(ids[tuple(where)] for where in kept) == self._log.kept
        if not right:
            return "WRONG"
        return f"shown by a second start; the first: {failed[0]}" if failed else "shown"

    def _relay_to_its_end(self, command):
        """None, or why not."""
        job = self._process(command, "relay")
        try:
            return None if job.wait(BOUND_S) == 0 else last_line(self._place / "relay.err")
        except subprocess.TimeoutExpired:
            return "did not come to its end in time"
        finally:
            kill_session(job)


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
    return re.sub(r"Query \[id = .*?\]", "Query", lines[-1])[:300] if lines else "it said nothing"


def write(release, found):
    """Put what was seen of a release into the page; what was not run this time stays as it was."""
    head, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    old, _, tail = rest.partition(END)
    lines = defaultdict(list)
    for line in old.splitlines():
        if named := re.match(r"(?:\| |- )(\d+\.\d+\.\d+)\b", line):
            lines[named[1]].append(line)
    lines[release] = list(lines_of(release, found, lines[release]))
    table = [f"| Spark | source | form | carrier | {' | '.join(HEADS)} |", "|---" * (4 + len(SINKS)) + "|"]
    in_order = sorted(lines, key=lambda one: tuple(map(int, one.split("."))))
    table += [line for one in in_order for line in lines[one] if line.startswith("|")]
    why = [line for one in in_order for line in lines[one] if line.startswith("-")]
    DOCS.write_text("\n".join([head + BEGIN, "", *table, "", *why, *[""][: len(why)], END + tail]), encoding="utf-8")


def lines_of(release, found, old):
    """The rows of one release, and a line for each cell that was run and is not shown."""
    before, source = {}, found[SOURCE]
    for line in old:
        if line.startswith("|"):
            _, _, _, form, carrier, *cells = (cell.strip() for cell in line.split("|"))
            before |= {(form, carrier, sink): cell for sink, cell in zip(SINKS, cells, strict=False)}
    for form, possible in FORMS.items():
        for carrier in ("key",) if form == "relay" else CARRIERS:
            answers = [found.get((form, carrier, sink), before.get((form, carrier, sink), "")) for sink in SINKS]
            said = [answer[:5] if answer[:5] in {"shown", "WRONG"} else "not shown" for answer in answers]
            cells = [one if sink in possible else "" for sink, one in zip(SINKS, said, strict=True)]
            yield f"| {release} | {source} | {form} | {carrier} | {' | '.join(cells)} |"
    yield from (line for line in old if line.startswith("-") and not any(named(cell) in line for cell in found))
    for cell, answer in found.items():
        if cell != SOURCE and answer != "shown":
            yield f"- {release}, {named(cell)} `{answer.replace('`', '')}`"


def named(cell):
    return f"{', '.join(cell)}:"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
