"""The apply job as a process: by spark-submit, failed, stopped politely, killed with its whole JVM at random."""

import json
import random
import re
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from filtering import StreamMetadata
from pushrep import Outbox
from pushrep.cli import main as cli_main
from spark_jobs.jobs import apply
from tests.integration.test_health import get, ready
from tests.ports import reserve
from tests.spark.replay.test_apply_job import Looks
from tests.spark_programs import QUIET, SparkPrograms, kill_session, said

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 3000
HOST = ("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1")
IN_ONE_BATCH = ("--max-records-per-trigger", "100000")


@pytest.fixture
def log(tmp_path):
    """A topic of two partitions with all records, many of them two or three times."""
    rng = random.Random(7)
    starts = [0]
    while starts[-1] < ROWS - 400:
        starts.append(starts[-1] + rng.randint(200, 400))
    for start in starts:
        append(tmp_path / "log", start, min(ROWS, start + 700))
    return tmp_path / "log"


@pytest.fixture
def job_options(tmp_path, log, torture):
    """Half a dozen batches; a dozen in the long form, to die in the middle of them."""
    size = str(torture.count(2300, 1100))
    return [
        *("--path", str(log), "--topic", "orders", "--sink", str(tmp_path / "table"), "--value-format", "string"),
        *("--checkpoint", str(tmp_path / "checkpoint"), "--max-records-per-trigger", size, "--json", "-"),
    ]


@pytest.fixture
def start(tmp_path):
    """Start the job; at the end none is left."""
    with SparkPrograms(tmp_path) as programs:

        def begin(*arguments, program=(sys.executable, "-m", "spark_jobs.jobs.apply"), **changed):
            return programs.start([*program, *arguments], **changed)

        yield begin


def finished(process):
    """Wait for the end of the job, and return its events. A failure shows the job's output."""
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, f"exit code {process.returncode}: {said(process)}"
    return [json.loads(line) for line in out.splitlines()]


def table(tmp_path):
    rows = ds.dataset(tmp_path / "table", format="parquet", partitioning="hive").to_table(["partition", "value"])
    return sorted((row["partition"], int(row["value"])) for row in rows.to_pylist())


def up_to(rows):
    return [(partition, n) for partition in range(2) for n in range(rows)]


def append(log, start, end):
    """More of the same in both partitions."""
    with Outbox.open(log, topic="orders", partitions=2, producer="p") as box:
        for partition in range(2):
            values = [b"%d" % n for n in range(start, end)]
            box.append_many(partition, values, metadata=StreamMetadata(5, partition, start))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_at_random_never_changes_the_table(start, job_options, tmp_path, torture):
    """The short form is tests/spark/test_demo.py: killed at a drawn moment inside a batch, and judged by SQL."""
    rng, seed = torture.random("kills"), torture.seed
    for _ in range(20):
        process = start(*job_options)
        batches = rng.randint(0, 2)
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] in ("started", "batch"):
                if batches == 0:
                    break
                batches -= 1
        # No synchronisation: the moment is meant to be anywhere inside or between the batches.
        time.sleep(rng.random() * 2)
        kill_session(process)
        if (tmp_path / "table").exists() and any((tmp_path / "table").glob("batch_id=*")):
            seen = table(tmp_path)
            assert len(seen) == len(set(seen)), f"seed {seed}: a reader saw a row twice after a kill"
            assert set(seen) <= set(up_to(ROWS))
    finished(start(*job_options, *IN_ONE_BATCH))
    assert table(tmp_path) == up_to(ROWS), f"seed {seed}"


def test_an_error_in_a_batch_is_one_line_and_1_and_sigterm_finishes_the_batch_and_ends_with_0(
    start, job_options, tmp_path
):
    """The first run is by spark-submit, which runs the file that the job names; the second run continues after it."""
    fails_in_a_batch(start, job_options, tmp_path)
    with reserve() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        process = start(*job_options, *IN_ONE_BATCH, "--trigger", "100ms", "--health", address)
        assert json.loads(process.stdout.readline())["event"] == "started", said(process)
    kept = kept_until(process, 2 * ROWS)
    assert table(tmp_path) == up_to(ROWS), "goes on with the batch that failed"
    assert ready(f"http://{address}")[:2] == (200, [])
    append(tmp_path / "log", ROWS, ROWS + 100)
    kept += kept_until(process, 2 * 100)
    page = get(f"http://{address}/metrics")[1].decode()
    assert re.search(rf'pushrep_filter_kept_records_total{{name="apply orders",source="[^"]+"}} {kept}.0', page), page
    process.send_signal(signal.SIGTERM)
    stopped = finished(process)[-1]
    assert (stopped["event"], stopped["kept"], kept) == ("stopped", kept, 2 * (ROWS + 100))
    assert table(tmp_path) == up_to(ROWS + 100)


def fails_in_a_batch(start, job_options, tmp_path):
    schema = tmp_path / "order.avsc"
    schema.write_text('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "double"}]}')
    process = start(
        *("--master", "local[2]", *QUIET.split(), *HOST, apply.__file__, *job_options),
        *("--value-format", "avro", "--value-schema", str(schema)),
        program=(str(Path(sys.executable).with_name("spark-submit")),),
        PYSPARK_SUBMIT_ARGS="",
    )
    out, _ = process.communicate(timeout=240)
    process.errors.seek(0)
    lines = [*out.splitlines(), *process.errors.read().splitlines()]  # all that Python says is spark-submit's output
    words = [line for line in lines if not line.startswith("{")]
    assert process.returncode == 1
    # Spark's daemon shows one of its own if the JVM ends while it tells it of a new worker.
    frames = [line for line in words if line.lstrip().startswith("File ")]
    assert not [line for line in frames if "pyspark/daemon.py" not in line], words
    assert [line.startswith("error: ") for line in words if "can't be decoded" in line] == [True], words
    assert not [line for line in words if line.startswith("\tat ")], "no stack of Java"
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert (events[0]["event"], events[-1]["event"]) == ("started", "failed")
    assert "offset 0" in events[-1]["error"]
    assert not list((tmp_path / "table").glob("batch_id=*")), "nothing of it is written"


def kept_until(process, wanted):
    """Wait until so many rows have passed the filter, or more; how many."""
    kept = 0
    while kept < wanted:
        line = process.stdout.readline()
        assert line, said(process)
        event = json.loads(line)
        assert (event["event"], event["rows"] > 0) == ("batch", True), "what is done makes no batch"
        kept += event["kept"]
    return kept


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["database", "path"])
def test_a_job_meets_a_repair_while_it_runs(start, tmp_path, torture, kind):
    """The job replaces the rows between two batches; no reader of a database sees half of it; then the job
    continues.
    """
    if not torture.is_long:
        pytest.skip("the long form: in one session, and killed, a repair is tested by test_apply_job.py")
    append(tmp_path / "log", 0, 200)
    sink = ["--sink", str(tmp_path / "table")]
    if kind == "database":
        sink = ["--sink", f"sqlite:{tmp_path / 'orders.db'}", "--table", "orders"]
    process = start(
        *("--path", str(tmp_path / "log"), "--topic", "orders", "--consumer", "billing", "--value-format", "string"),
        *("--checkpoint", str(tmp_path / "checkpoint"), "--trigger", "100ms", "--json", "-", *sink),
    )

    def kept(wanted):
        """Wait until so many rows more have passed the filter."""
        for line in process.stdout:
            wanted -= json.loads(line).get("kept", 0)
            if wanted <= 0:
                break
        assert wanted == 0, said(process)

    def rows():
        """(partition, value) -> batch, without duplicates."""
        if kind == "path":
            names = ["partition", "value", "batch_id"]
            found = ds.dataset(tmp_path / "table", format="parquet", partitioning="hive").to_table(names).to_pylist()
            seen = [tuple(row.values()) for row in found]
        else:
            with closing(sqlite3.connect(tmp_path / "orders.db", timeout=60)) as database:
                seen = database.execute('SELECT "partition", value, pushrep_batch FROM orders').fetchall()
        assert len({row[:2] for row in seen}) == len(seen)
        return {(partition, int(value)): batch for partition, value, batch in seen}

    kept(400)
    first = rows()
    with Looks((lambda: len(rows())) if kind == "database" else None) as looks:
        words = ["--consumer", "billing", "--from", "50", "--to", "150", "--reason", "rates"]
        assert cli_main.run(["startpoint", "repair", str(tmp_path / "log"), "orders", *words, *sink]) == 0
        kept(300)
    assert looks.found == ({400} if kind == "database" else set()), "a reader saw half of it"
    append(tmp_path / "log", 200, 220)
    kept(40)
    process.terminate()
    assert finished(process)[-1]["event"] == "stopped"
    second = rows()
    assert sorted(second) == up_to(220)
    assert {place for place in first if second[place] != first[place]} == {p for p in first if 50 <= p[1] < 150}
