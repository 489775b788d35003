"""The apply command before Spark starts: its help, its refusals, its events, its one-line errors."""

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

import spark_jobs.jobs.apply as apply_module
from filtering.extras import MissingExtra, needed_by
from pushrep import Outbox
from pushrep.health import HealthSettings
from spark_jobs.decide import BatchCounts
from spark_jobs.errors import BadJobOption
from spark_jobs.jobs.apply import main
from spark_jobs.jobs.command import Reporter, one_line, served
from spark_jobs.jobs.options import ApplyOptions
from tests.ports import reserve

GIVEN = ["--topic", "t", "--path", "{logs}", "--sink", "{tmp}/s", "--checkpoint", "{tmp}/c"]


def test_help_teaches():
    answer = CliRunner().invoke(main, ["--help"])
    assert answer.exit_code == 0
    for word in ("--trigger", "available-now", "--value-schema", "--adopt", "Examples", "SIGTERM", "spark-submit"):
        assert word in answer.output


def test_a_carrier_unlike_the_outbox_is_refused(tmp_path):
    Outbox.open(tmp_path, topic="t", partitions=1, producer="p", carrier="header").close()
    given = ["--topic", "t", "--path", str(tmp_path), "--sink", "./s", "--checkpoint", "./c"]
    answer = CliRunner().invoke(main, [*given, "--trigger", "often"])
    assert "error: --carrier='key': the outbox in" in answer.output
    assert "give --carrier header" in answer.output
    assert "--trigger" in CliRunner().invoke(main, [*given, "--trigger", "often", "--carrier", "header"]).output


HEADER_CARRIER = ["--topic", "h", "--path", "{headers}", *GIVEN[4:], "--carrier", "header"]
WRONG = {
    "nothing": ([], 2, "Missing option"),
    "a pair without =": ([*GIVEN, "--source-option", "x"], 2, "'x' is not NAME=VALUE"),
    "a pair without a name": ([*GIVEN, "--conf", "=x"], 2, "'=x' is not NAME=VALUE"),
    "half an adoption": ([*GIVEN, "--adopt", "q"], 2, "'q' is not QUERY:BATCH"),
    "a negative window": ([*GIVEN, "--window", "-1"], 2, "--window"),
    "a ttl, and nobody says what it must outlive": ([*GIVEN, "--ttl-s", "10"], 1, "error: --ttl-s=10.0"),
    "a ttl shorter than the retention": (
        [*GIVEN, "--ttl-s", "10", "--retention-ms", "10001"], 1, "error: --ttl-s=10.0",
    ),
    "a pid of more than 64 bits": ([*GIVEN, "--only-pid", str(2**63)], 2, "--only-pid"),
    "a schema that is not there": ([*GIVEN, "--value-schema", "{tmp}/none"], 2, "--value-schema"),
    "an interval of words": ([*GIVEN, "--trigger", "often"], 1, "--trigger='often': give available-now"),
    "real-time mode": ([*GIVEN, "--trigger", "Real-Time 5s"], 1, "--trigger='Real-Time 5s': Real-Time Mode admits no"),
    "avro without a schema": ([*GIVEN, "--value-format", "avro"], 1, "--value-schema: format avro needs a schema"),
    "a schema that is no text": (
        [*GIVEN, "--value-format", "avro", "--value-schema", "{tmp}/raw"], 1,
        "error: --value-schema='{tmp}/raw': it is no text: 'utf-8' codec",
    ),
    "no path": ([*GIVEN[:2], *GIVEN[4:]], 1, "error: --path: source pushrep reads logs from a directory: name it"),
    "a path for kafka": ([*GIVEN, "--source", "kafka"], 1, "--path='{logs}': belongs to source pushrep"),
    "startpoints for kafka": (
        [*GIVEN[:2], *GIVEN[4:], "--source", "kafka", "--consumer", "c"], 1, "--consumer='c': only source pushrep",
    ),
    "a consumer said twice": (
        [*GIVEN, "--source-option", "startingStartpoint=c"], 1, "startingStartpoint='c': the job has an option",
    ),
    "a window beside startpoints": ([*GIVEN, "--consumer", "b", "--window", "9"], 1, "--window=9: a startpoint that"),
    "a store of no brokers": (
        [*GIVEN, "--consumer", "c", "--source-option", "startpoints=kafka:s"], 1, "startpoints.bootstrap.servers",
    ),
    "a store of another kind": (
        [*GIVEN, "--consumer", "c", "--source-option", "startpoints=s3://b/s"], 1, "startpoints='s3://b/s': a store",
    ),
    "an empty sink": ([*GIVEN, "--sink", ""], 1, "error: --sink='': it is empty"),
    "an empty checkpoint": ([*GIVEN, "--checkpoint", ""], 1, "error: --checkpoint='': it is empty"),
    "a file as marks": ([*GIVEN, "--marks", "{tmp}/raw"], 1, "--marks='{tmp}/raw': {tmp}/raw is a file"),
    "a table format for a path": ([*GIVEN, "--format", "hudi"], 1, "--format='hudi': a path takes one of parquet"),
    "marks in the checkpoint's place": ([*GIVEN, "--marks", "{tmp}/c"], 1, "it is the checkpoint itself"),
    "marks among the logs": ([*GIVEN, "--marks", "{logs}"], 1, "--marks='{logs}': it is the directory of the logs"),
    "marks in the table": ([*GIVEN, "--marks", "{tmp}/s"], 1, "--marks='{tmp}/s': it lies in the table of --sink"),
    "a topic that is not there": ([*GIVEN, "--topic", "T"], 1, "topic='T': there is no log of it in {logs}"),
    "a directory without logs": ([*GIVEN, "--path", "{tmp}"], 1, "there is no log of it in {tmp}, which holds no logs"),
    "a directory that is not there": ([*GIVEN, "--path", "{tmp}/no"], 1, "path='{tmp}/no': it is no directory of logs"),
    "a file of logs": ([*GIVEN, "--path", "{tmp}/raw"], 1, "path='{tmp}/raw': it is no directory of logs"),
    "a partition that is not there": (
        [*GIVEN, "--source-option", "partitions=0,7"], 1, "option partitions: it names [7], topic 't' has [0, 1]",
    ),
    "an unknown option of the source": ([*GIVEN, "--source-option", "subscribe=t"], 1, "option subscribe='t': there"),
    "an end for a stream": ([*GIVEN, "--source-option", "endingOffsets=latest"], 1, "option endingOffsets='latest'"),
    "offsets that are none": ([*GIVEN, "--starting-offsets", "first"], 1, "option startingOffsets='first'"),
    "two starts": (
        [*GIVEN, "--starting-offsets", "latest", "--source-option", "startingTimestamp=0"],
        1, "--source-option startingTimestamp='0': give it or --starting-offsets, not both",
    ),
    "the topic a second time": ([*GIVEN, "--source-option", "Topic=u"], 1, "Topic='u': the job has an option"),
    "the limit a second time": (
        [*GIVEN, "--max-records-per-trigger", "9", "--source-option", "maxRecordsPerTrigger=5"],
        1, "--source-option maxRecordsPerTrigger='5': the job has an option of its own for it",
    ),
    "headers switched off that are needed": (
        [*HEADER_CARRIER, "--source-option", "includeHeaders=false"],
        1, "--source-option includeHeaders='false': --carrier header reads them",
    ),
    "a column kept twice": ([*GIVEN, "--keep", "topic,topic"], 1, "--keep: topic is named twice"),
    "a database without a table": ([*GIVEN, "--sink", "sqlite:{tmp}/d.db"], 1, "error: --table: name the database's"),
    "a table without a database": ([*GIVEN, "--table", "t"], 1, "--table='t': belongs to a database: --sink postgres"),
    "a table without a name": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "s."], 1, "--table='s.': name a table",
    ),
    "marks beside a database": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "t", "--marks", "{tmp}/m"],
        1, "--marks='{tmp}/m': a database has them beside the rows",
    ),
    "a database's format": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "t", "--format", "orc"], 1, "--format='orc': belongs to a",
    ),
    "a database by partitions": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "t", "--partition-by", "topic"],
        1, "--partition-by='topic': belongs to a table of files",
    ),
    "a file's option for a database": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "t", "--sink-option", "a=b"],
        1, "--sink-option='a': belongs to a table of files",
    ),
    "rows that a database can't tell apart": (
        [*GIVEN, "--sink", "sqlite:{tmp}/d.db", "--table", "t", "--keep", "topic,offset"],
        1, "--keep='topic,offset': partition is missing: a database's rows are distinguished by",
    ),
    "health at no address": ([*GIVEN, "--health", "here"], 1, "--health: 'here' is not host:port"),
    "health for everybody": ([*GIVEN, "--health", "0.0.0.0:0"], 1, "--health: 0.0.0.0:0 is reached from other"),
    "half a certificate": (
        [*GIVEN, "--health", "127.0.0.1:0", "--health-ca", "{tmp}/raw"], 1, "--health-cert: give cert, key and ca",
    ),
    "a certificate for no health": ([*GIVEN, "--health-key", "k"], 1, "--health-key: belongs to --health"),
    "events into no directory": ([*GIVEN, "--json", "{tmp}/no/e"], 1, "--json='{tmp}/no/e': can't be written: No such"),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Logs of t (two partitions) and h (header carrier), a file that is no text."""
    tmp = tmp_path_factory.mktemp("places")
    logs, headers = tmp / "logs", tmp / "headers"
    Outbox.open(logs, topic="t", partitions=2, producer="p").close()
    Outbox.open(headers, topic="h", partitions=1, producer="p", carrier="header").close()
    (tmp / "raw").write_bytes(b"\xff")
    return {"tmp": str(tmp), "logs": str(logs), "headers": str(headers)}


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    """A command that looks for Java has passed all checks before it. A session that an earlier test left is hidden."""
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    return tmp_path


def filled(texts, places):
    """The texts with the places' paths in them; other braces are JSON's."""
    for name, path in places.items():
        texts = [text.replace("{" + name + "}", path) for text in texts]
    return texts


@pytest.mark.parametrize("case", WRONG)
def test_refusals_come_before_spark_and_name_the_option(places, no_java, case):
    arguments, code, why = WRONG[case]
    directory = Path(places["tmp"])
    there = {path.name for path in directory.iterdir()}
    answer = CliRunner().invoke(main, filled(arguments, places))
    (wanted,) = filled([why], places)
    assert (answer.exit_code, wanted in answer.output) == (code, True), answer.output
    assert "Traceback" not in answer.output
    assert "secret" not in answer.output
    if code == 1:
        assert len(answer.output.splitlines()) == 1, "one line"
    assert {path.name for path in directory.iterdir()} == there, "a refusal leaves nothing behind"


def test_what_is_right_gets_as_far_as_java(places, no_java):
    answer = CliRunner().invoke(main, filled([*GIVEN, "--partition-by", "Topic"], places))
    assert answer.exit_code == 1
    advice = "Spark needs Java 17 or newer (OpenJDK will do): install it, or point JAVA_HOME at one"
    assert answer.output == f"error: JAVA_HOME={no_java} has no bin/java; {advice}\n"


def test_the_file_for_spark_submit():
    answer = CliRunner().invoke(main, ["--where"])
    assert (answer.exit_code, answer.output) == (0, f"{Path(apply_module.__file__).resolve()}\n")


def test_debug_shows_the_whole_stack():
    answer = CliRunner().invoke(main, [*GIVEN, "--trigger", "often", "--debug"])
    assert answer.exception is not None
    assert "often" in str(answer.exception)


def test_events_in_a_file_are_added_to(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with Reporter.open(str(path)) as reporter:
            reporter.started("q", "r")
            reporter.batch(BatchCounts(3, 10, 1, 2, kept=7, dropped=2, late=0, jumped=0))
            reporter.batch(BatchCounts(4, 10, 1, 0, skipped=True))
            reporter.failed("why")
            reporter.stopped()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["event"] for e in events] == ["started", "batch", "batch", "failed", "stopped"] * 2
    assert events[1] | {"seconds": 0} == {
        "event": "batch",
        "batch": 3,
        "rows": 10,
        "unkeyed": 1,
        "pairs": 2,
        "kept": 7,
        "dropped": 2,
        "late": 0,
        "jumped": 0,
        "unlikely_pairs": 0,
        "all_dropped": [],
        "skipped": False,
        "seconds": 0,
    }
    assert events[4] == {"event": "stopped", "batches": 2, "kept": 7}


def test_people_get_a_line_a_batch(capsys):
    with Reporter.open(None) as reporter:
        reporter.batch(BatchCounts(3, 10, 1, 2, kept=7, dropped=2))
        reporter.batch(BatchCounts(4, 5, 0, 0, skipped=True))
        reporter.failed("told elsewhere")
        reporter.stopped()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "batch 3: 10 records, 7 kept, 2 replays dropped, 1 without metadata pass",
        "batch 4: 5 records, stored before, not written again",
        "done: batches 2, records kept 7, without metadata 1",
    ]


GONE = "offset 9 is out of range"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("first\n\tat java.lang.Thread.run", "first"),
        ("[STREAM_FAILED] Query failed\nTraceback", "Query failed"),
        (
            "[PYTHON_EXCEPTION] An exception\nTraceback:\nx.y.BadOption: option path: missing\n SQLSTATE: 3\n\tat o.x",
            "option path: missing",
        ),
        (
            "An error occurred while calling o1.load.\n: org.x.NotFound: [NOT_FOUND] No kafak here.\n\tat o.x",
            "No kafak here.",
        ),
        (
            "\n".join(
                [
                    "Exception thrown in awaitResult: ",
                    "\tat o.x",
                    "Caused by: o.x.A: B",
                    f"Caused by: o.C: {GONE}",
                    "\tat",
                ]
            ),
            GONE,
        ),
        ("", "ValueError"),
    ],
)
def test_an_error_in_one_line(text, line):
    assert one_line(ValueError(text)) == line


def test_a_start_among_the_sources_own_options_is_the_only_one():
    """With the default start, too, the source would refuse a second start, which the user has not given."""

    def starts(**given):
        options = ApplyOptions(topic="t", path="p", sink="/s", checkpoint="c", marks="m", **given).reader_options()
        return {name: text for name, text in options.items() if name.lower().startswith("starting")}

    assert starts() == {"startingOffsets": "earliest"}
    assert starts(source_options={"startingTimestamp": "0"}) == {"startingTimestamp": "0"}
    assert starts(source_options={"STARTINGOFFSETS": "latest"}) == {"STARTINGOFFSETS": "latest"}


def test_a_gap_is_never_passed_over_in_kafka_whatever_case_the_option_has():
    given = {"topic": "t", "sink": "/s", "checkpoint": "c", "marks": "m", "source": "kafka"}
    with pytest.raises(BadJobOption, match="failOnDataLoss"):
        ApplyOptions(source_options={"failondataloss": "FALSE"}, **given)


def test_a_job_is_ready_once_its_query_runs_and_its_sums_are_metrics():
    reporter = Reporter(None)
    with reserve() as held:
        settings = HealthSettings(listen=f"127.0.0.1:{held.getsockname()[1]}")
        with served(settings, "apply orders", reporter):
            with pytest.raises(HTTPError) as refused:
                urlopen(f"http://{settings.listen}/readyz", timeout=60)
            with refused.value:
                assert json.load(refused.value)["problems"][0]["problem"] == "not_answering"
            reporter.started("q", "r")
            for batch in (BatchCounts(0, 9, 1, 2, 6, 2, 0, 3), BatchCounts(0, 9, 1, 0, skipped=True)):
                reporter.batch(batch)
            with urlopen(f"http://{settings.listen}/readyz", timeout=60) as answer:
                assert json.load(answer) == {"ready": True, "problems": []}
            with urlopen(f"http://{settings.listen}/metrics", timeout=60) as answer:
                page = answer.read().decode()
            with (
                pytest.raises(BadJobOption, match=r"--health: can't listen on .* in use"),
                served(settings, "", reporter),
            ):
                pytest.fail("the port is in use")
    of_query = '{name="apply orders",source="q"}'
    for name, value in ("kept_records", 6), ("dropped_records", 2), ("unkeyed_records", 1), ("jumped_offsets", 3):
        assert f"pushrep_filter_{name}_total{of_query} {value}.0" in page
    assert 'pushrep_problem{outbox="",problem="not_answering",topic=""} 0.0' in page


def test_a_program_without_its_package_ends_with_one_line():
    absent = ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
    line = "^error: this job needs the Python package 'pyspark', which is not installed: pip install"
    with pytest.raises(SystemExit, match=line), needed_by("this job", is_program=True):
        raise absent
    with pytest.raises(MissingExtra), needed_by("this job"):
        raise absent
