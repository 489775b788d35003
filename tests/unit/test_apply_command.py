"""The apply command before Spark starts: its help, its refusals, its events, its one-line errors."""

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("pyspark")

from pushrep import Outbox
from spark_jobs.jobs.apply import main
from spark_jobs.jobs.pipeline import ApplyOptions, BadOption
from spark_jobs.jobs.reporting import Reporter, one_line
from spark_jobs.replay_filter import BatchCounts

GIVEN = ["--topic", "t", "--path", "p", "--sink", "./s", "--checkpoint", "./c"]


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


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], 2, "Missing option"),
        ([*GIVEN, "--source-option", "x"], 2, "'x' is not NAME=VALUE"),
        ([*GIVEN, "--conf", "=x"], 2, "'=x' is not NAME=VALUE"),
        ([*GIVEN, "--adopt", "q"], 2, "'q' is not QUERY:BATCH"),
        ([*GIVEN, "--window", "-1"], 2, "--window"),
        ([*GIVEN, "--trigger", "often"], 1, "error: --trigger='often'"),
        ([*GIVEN, "--value-format", "avro"], 1, "error: value-schema: format avro needs a schema"),
        ([*GIVEN[:2], *GIVEN[4:]], 1, "error: --path=None"),
        ([*GIVEN, "--sink", ""], 1, "error: --sink='': it is empty"),
        ([*GIVEN, "--checkpoint", ""], 1, "error: --checkpoint='': it is empty"),
        ([*GIVEN, "--checkpoint", __file__], 1, "it is a file; name a directory"),
    ],
)
def test_refusals_come_before_spark(arguments, code, why):
    answer = CliRunner().invoke(main, arguments)
    assert (answer.exit_code, why in answer.output) == (code, True), answer.output
    assert "Traceback" not in answer.output


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
        "batch 4: 5 records, run before, not again",
        "done: batches 2, records kept 7, without metadata 1",
    ]


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
        ("", "ValueError"),
    ],
)
def test_an_error_in_one_line(text, line):
    assert one_line(ValueError(text)) == line


def test_a_start_among_the_sources_own_options_is_the_only_one():
    """The default start beside it would be refused as a second one, which nobody gave."""

    def starts(**given):
        options = ApplyOptions(topic="t", path="p", sink="/s", checkpoint="c", marks="m", **given).reader_options()
        return {name: text for name, text in options.items() if name.lower().startswith("starting")}

    assert starts() == {"startingOffsets": "earliest"}
    assert starts(source_options={"startingTimestamp": "0"}) == {"startingTimestamp": "0"}
    assert starts(source_options={"STARTINGOFFSETS": "latest"}) == {"STARTINGOFFSETS": "latest"}
    assert len(starts(starting_offsets="latest", source_options={"startingTimestamp": "0"})) == 2, "the source refuses"


def test_a_gap_is_never_passed_over_in_kafka_whatever_case_the_option_has():
    given = {"topic": "t", "sink": "/s", "checkpoint": "c", "marks": "m", "source": "kafka"}
    with pytest.raises(BadOption, match="failOnDataLoss"):
        ApplyOptions(source_options={"failondataloss": "FALSE"}, **given)
