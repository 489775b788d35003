"""The commands `pushrep` and `pushrep append`, and `pushrep replay` of an outbox: what they print, how they end."""

import contextlib
import io
import json
import operator
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from filtering import StreamMetadata
from filtering.extras import MissingExtra
from pushrep.cli import main as cli_main
from pushrep.cli.common import parse_time_ms, whole_step
from pushrep.log import NotALog, SegmentLog
from pushrep.outbox import Outbox
from tests.programs import PUSHREP


@pytest.fixture
def pushrep(capfd):
    """Run a command line in this process: (exit code, output, errors)."""

    def run(*arguments):
        capfd.readouterr()
        code = cli_main.run([str(argument) for argument in arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return run


def values(directory, name):
    with SegmentLog.open_reader(directory / name, isolation="written") as log:
        return [record.value.decode() for record in log.records(0)]


# -- the command itself ------------------------------------------------------------------------------------------------


def test_help_names_the_commands_and_loads_none():
    script = (
        "import sys; from pushrep.cli.main import run; code = run(['--help']); "
        "loaded = [m for m in ('pushrep.cli.append', 'pushrep.outbox', 'pyspark', 'numpy') if m in sys.modules "
        "and m != 'numpy']; print('loaded', loaded); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("append", "log", "replay"):
        assert f"\n  {name} " in done.stdout
    assert done.stdout.endswith("loaded []\n"), "showing the list imports no command"


def test_log_lines_are_text_or_one_json_object_each_with_the_error(tmp_path):
    """In a program of its own: a root logger that has handlers keeps them."""
    script = (
        "import logging, sys\nfrom pushrep.cli.common import log_to_stderr\n"
        "log_to_stderr(*sys.argv[1:])\nlog = logging.getLogger('pushrep.log')\n"
        "log.info('not at this level')\nlog.warning('%s\\nforged', 'two lines')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('it failed')\n"
    )

    def told(*arguments):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    first, second = map(json.loads, told("json", "warning"))
    assert datetime.fromisoformat(first.pop("time")).utcoffset() == timedelta(0)
    assert first == {"level": "WARNING", "logger": "pushrep.log", "message": "two lines\nforged"}
    assert (second["level"], second["message"]) == ("ERROR", "it failed")
    assert second["error"].startswith("Traceback")
    assert second["error"].endswith("ZeroDivisionError: division by zero")
    assert json.loads(told("json", "info")[0])["message"] == "not at this level"
    assert re.match(r"20\d\d-.* WARNING pushrep\.log: two lines", told("text", "warning")[0])


def test_log_format_json_is_what_a_command_logs_in(tmp_path):
    command = [PUSHREP, "--log-format", "json", "replica", "serve", tmp_path / "copies", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            said = json.loads(process.stderr.readline())
        finally:
            process.kill()
    assert (said["level"], said["logger"]) == ("WARNING", "pushrep.node")
    assert said["message"].startswith("nobody may use this node")


@pytest.mark.parametrize("command", ["append", "replay"])
def test_help_teaches_with_examples(pushrep, command):
    code, output, _ = pushrep(command, "--help")
    assert code == 0
    assert output.count(f"pushrep {command} out") >= 2, "examples stand as they are typed"


def test_wrong_usage_is_two_and_a_refusal_is_one_line(pushrep, tmp_path):
    code, _, errors = pushrep("unheard-of")
    assert code == 2
    assert "No such command 'unheard-of'" in errors
    code, output, errors = pushrep("replay", tmp_path / "nowhere", "orders")
    assert (code, output) == (1, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_a_command_without_its_package_says_what_to_install(pushrep, monkeypatch):
    missing = EntryPoint("demo", "no_such_package_at_all:demo", cli_main.GROUP)
    foreign = EntryPoint("foreign", "json:dumps", cli_main.GROUP)
    monkeypatch.setattr(cli_main, "entry_points", lambda group: [missing, foreign])
    code, _, errors = pushrep("demo")
    assert code == 1
    assert "needs the Python package 'no_such_package_at_all'" in errors
    code, _, errors = pushrep("foreign")
    assert code == 1
    assert "is not a click command" in errors
    code, output, _ = pushrep("--help")
    assert code == 0
    assert "(unavailable: entry point" in output


@click.command(short_help="A demo.")
@click.argument("raises")
def demo(raises):
    raise LATE[raises]


LATE = {
    "a package": ModuleNotFoundError("no", name="no_such_package_at_all.errors"),
    "an extra": MissingExtra("the demo", "aiokafka"),
    "a bug": ImportError("a bug"),
}


def test_a_package_that_is_missing_later_is_named_and_a_bug_of_ours_is_raised(pushrep, monkeypatch):
    installed = SimpleNamespace(name="demo", module="demo", load=lambda: demo)
    broken = SimpleNamespace(name="broken", module="demo", load=lambda: operator.attrgetter("of_theirs")(json))
    monkeypatch.setattr(cli_main, "entry_points", lambda group: [installed, broken])
    why = "needs the Python package 'no_such_package_at_all', which is not installed"
    code, _, errors = pushrep("demo", "a package")
    assert (code, errors.startswith(f"error: pushrep demo {why}")) == (1, True)
    assert pushrep("demo", "an extra") == (1, "", f"error: {LATE['an extra']}\n")
    with pytest.raises(ImportError, match="a bug"):
        pushrep("demo", "a bug")
    with pytest.raises(AttributeError, match="of_theirs"):
        pushrep("broken")
    monkeypatch.setattr(cli_main, "entry_points", lambda group: [installed])
    assert "  demo  A demo.\n" in pushrep("--help")[1], "a command of another package shows its own words"


@pytest.mark.parametrize(("interrupts", "is_done"), [(0, True), (1, True), (2, False)])
def test_an_interrupt_waits_for_the_end_of_a_whole_step_and_the_second_does_not(interrupts, is_done):
    before, done = signal.getsignal(signal.SIGINT), []

    def step():
        with whole_step():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            done.append("the rest of the step")

    with pytest.raises(KeyboardInterrupt) if interrupts else contextlib.nullcontext():
        step()
    assert (bool(done), signal.getsignal(signal.SIGINT)) == (is_done, before)


def test_the_group_is_a_click_command_for_embedders():
    assert "Commands:" in CliRunner().invoke(cli_main.cli, ["--help"]).output


# -- append ------------------------------------------------------------------------------------------------------------


def test_lines_go_round_the_partitions(pushrep, tmp_path):
    (tmp_path / "in.txt").write_bytes(b"one\r\ntwo\n\nfour")
    code, output, _ = pushrep("append", tmp_path / "out", "greetings", tmp_path / "in.txt", "--partitions", 2)
    assert code == 0
    assert output.startswith("appended 4 records to greetings in ")
    assert values(tmp_path / "out", "greetings-1") == ["one", ""]
    assert values(tmp_path / "out", "greetings-0") == ["two", "four"]


def test_a_second_run_appends_nothing_and_a_longer_file_its_rest(pushrep, tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("a\nb\nc\n")
    pushrep("append", tmp_path / "out", "t", file, "--partitions", 2)
    code, output, _ = pushrep("append", tmp_path / "out", "t", file, "--json")
    assert code == 0
    summary = json.loads(output)
    assert (summary["appended"], summary["already_there"], summary["log_end_offsets"]) == (0, 3, [1, 2])
    file.write_text("a\nb\nc\nd\ne\n")
    _, output, _ = pushrep("append", tmp_path / "out", "t", file, "--json")
    assert json.loads(output)["appended"] == 2
    assert values(tmp_path / "out", "t-0") == ["b", "d"]
    assert values(tmp_path / "out", "t-1") == ["a", "c", "e"]


def test_another_file_under_a_known_name_is_refused(pushrep, tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("a\nb\n")
    pushrep("append", tmp_path / "out", "t", file)
    file.write_text("other\nlines\nhere\n")
    code, _, errors = pushrep("append", tmp_path / "out", "t", file)
    assert code == 1
    assert "line 2 of" in errors
    assert "--source NAME" in errors
    assert values(tmp_path / "out", "t-0") == ["a", "b"]
    code, _, _ = pushrep("append", tmp_path / "out", "t", file, "--source", "second")
    assert code == 0
    assert values(tmp_path / "out", "t-0") == ["a", "b", "other", "lines", "here"]


def test_a_disk_above_its_limit_is_told_with_the_setting(pushrep, tmp_path):
    (tmp_path / "in").write_text("line\n" * 20_000)
    limits = [
        f"disk_{level}_{limit}"
        for level in ("warn", "pressed", "refuse")
        for limit in ("percent=0", f"free_bytes={1 << 60}")
    ]
    options = [word for limit in limits for word in ("--log", limit)]
    code, _, said = pushrep(
        "append", tmp_path / "out", "t", tmp_path / "in", "--log", "segment_bytes=1048576", *options
    )
    assert code == 1
    assert "disk_refuse_percent=0" in said
    assert "has to go first" not in said


@pytest.mark.parametrize(
    ("long", "why"), [(2 << 20, "line 2: is longer than"), ((1 << 20) - 80, "line 2: the record may take")]
)
def test_a_line_above_the_limit_is_named_and_the_run_goes_on_when_it_is_gone(pushrep, tmp_path, long, why):
    file = tmp_path / "in.txt"
    file.write_bytes(b"short\n" + b"x" * long + b"\nend\n")
    code, _, errors = pushrep("append", tmp_path / "out", "t", file)
    assert code == 1
    assert why in errors
    assert values(tmp_path / "out", "t-0") == ["short"], "what came before is in the log"
    file.write_bytes(b"short\nend\n")
    code, _, errors = pushrep("append", tmp_path / "out", "t", file)
    assert code == 0, errors
    assert values(tmp_path / "out", "t-0") == ["short", "end"]


def test_an_empty_name_of_a_source_is_refused(pushrep, tmp_path):
    code, output, errors = pushrep("append", tmp_path / "out", "t", "-", "--source", "")
    assert (code, output) == (2, "")
    assert "--source: it is empty" in errors
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_directory_are_named(pushrep, tmp_path):
    code, _, errors = pushrep("append", tmp_path / "out", "t", tmp_path / "nothing")
    assert (code, errors) == (1, f"error: {tmp_path / 'nothing'}: No such file or directory\n")
    code, _, errors = pushrep("append", tmp_path / "out", "t", tmp_path)
    assert code == 2
    assert "is a directory" in errors
    assert not (tmp_path / "out").exists(), "nothing half-made remains"


def test_what_the_log_was_made_with_is_kept(pushrep, tmp_path):
    file = tmp_path / "in"
    file.write_text("a\n")
    pushrep("append", tmp_path / "out", "t", file, "--producer", "shop", "--partitions", 2)
    code, _, errors = pushrep("append", tmp_path / "out", "t", file)
    assert code == 0, errors
    code, _, errors = pushrep("append", tmp_path / "out", "t", file, "--partitions", 3)
    assert code == 1
    assert "partitions: this outbox was made with partitions=2" in errors


def until(condition):
    """Wait for another process; the next assertion shows what is missing."""
    pause = threading.Event()
    for _ in range(3_000):
        if condition():
            return
        pause.wait(0.02)  # each look opens the log


def written(path):
    """The number of records in a log that another process writes; 0 before it exists."""
    with contextlib.suppress(NotALog), SegmentLog.open_reader(path, isolation="written") as log:
        return log.log_end_offset
    return 0


def command(*arguments, program=(sys.executable, "-m", "pushrep.cli.main")):
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_standard_input_is_appended_anew_unless_it_has_a_name(pushrep, tmp_path, monkeypatch):
    unnamed, named = (), ("-", "--source", "feed")
    for source, appended in ((unnamed, 2), (unnamed, 2), (named, 2), (named, 0)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
        code, output, errors = pushrep("append", tmp_path / "out", "t", *source, "--json")
        assert (code, json.loads(output)["appended"]) == (0, appended), errors
    assert values(tmp_path / "out", "t-0") == ["a", "b"] * 3


def test_killed_in_the_middle_it_goes_on_where_the_log_ends(tmp_path):
    lines = [f"{n} {'x' * 80}" for n in range(100_000)]
    file = tmp_path / "in.txt"
    file.write_text("\n".join(lines) + "\n")
    arguments = ("append", tmp_path / "out", "t", file, "--partitions", 2, "--json")
    run = command(*arguments)
    until(lambda: run.poll() is not None or written(tmp_path / "out" / "t-0") > 1_000)
    run.kill()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL, f"it was to be killed under way: {errors}"
    output, errors = command(*arguments, program=[PUSHREP]).communicate(timeout=120)
    summary = json.loads(output)
    assert summary["already_there"] > 0, errors
    assert summary["appended"] + summary["already_there"] == len(lines)
    assert values(tmp_path / "out", "t-1") == lines[0::2], "each line once, in order"
    assert values(tmp_path / "out", "t-0") == lines[1::2]


def test_an_interrupt_ends_it_cleanly_with_all_it_read(tmp_path):
    run = command("append", tmp_path / "out", "t", "-")
    run.stdin.write(b"a\nb\n")
    run.stdin.flush()
    # It waits for more lines; what it has read lingers a moment and is then written.
    until(lambda: written(tmp_path / "out" / "t-0") == 2)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert errors.decode().strip().endswith("interrupted")
    assert b"Traceback" not in errors
    with Outbox.open(tmp_path / "out", "t", 1, "pushrep-append") as outbox:
        assert [record.value for record in outbox.log(0).records(0)] == [b"a", b"b"]
        assert outbox.log(0).recovery.opening.name == "NORMAL", "closed clean"


@pytest.mark.parametrize("from_pipe", [False, True])
def test_progress_is_shown_on_a_terminal_only(tmp_path, from_pipe):
    (tmp_path / "in.txt").write_bytes(b"line\n" * 20_000)
    ours, theirs = os.openpty()
    arguments = ["append", str(tmp_path / "out"), "t", "-" if from_pipe else str(tmp_path / "in.txt")]
    with subprocess.Popen(
        [PUSHREP, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    ) as run:  # fmt: skip
        os.close(theirs)
        if from_pipe:
            run.stdin.write(b"line\n" * 20_000)
        run.stdin.close()
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other side was closed
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        output = run.stdout.read()
    assert run.returncode == 0, shown
    assert b"appending" in shown
    assert b" lines" in shown
    assert output.startswith(b"appended 20,000 records"), "standard output stays clean"


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def orders(tmp_path):
    """An outbox, still open: the commands read beside it."""
    with Outbox.open(tmp_path / "out", "orders", 2, "billing") as outbox:
        for n in range(30):
            outbox.append(0, b"order %d" % n, timestamp_ms=1000 * n)
        outbox.append(1, b"\xff\x00", headers=[("trace", b"7")], metadata=StreamMetadata(9, 3, 44))
        outbox.append(1, None)
        outbox.flush()
        yield outbox


def test_a_table_shows_the_first_records_with_their_sources(pushrep, orders):
    code, output, _ = pushrep("replay", orders.directory, "orders", "--format", "table")
    assert code == 0
    head, *rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    assert len(rows) == 22, rows[20:]
    assert head == ["partition", "offset", "timestamp", "value", "source", "headers"], "no record has a key of its own"
    assert rows[0] == ["0", "0", "1970-01-01 00:00:00.000", "order 0", f"{orders.pid} 0 0"]
    assert rows[20][3:] == ["ff00", "9 3 44", "trace=7"]


def test_json_has_every_field(pushrep, orders):
    code, output, _ = pushrep("replay", orders.directory, "orders-1")
    rows = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    for row in rows:
        row.pop("timestamp_ms")
    assert rows == [
        {"partition": 1, "offset": 0, "source": {"pid": 9, "partition": 3, "offset": 44}, "value_base64": "/wA=",
         "headers": [{"name": "trace", "value": "7"}]},
        {"partition": 1, "offset": 1, "source": {"pid": orders.pid, "partition": 1, "offset": 1}, "value": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "first", "count"),
    [
        ([], 0, 30),
        (["--count", "3"], 0, 3),
        (["--from", "7", "--count", "2"], 7, 2),
        (["--from", "latest"], 20, 10),
        (["--from", "latest", "--count", "4"], 26, 4),
        (["--from", "1970-01-01T00:00:12Z"], 12, 18),
        (["--from", "1970-01-01T00:00:11.5"], 12, 18),
        (["--bound", "written"], 0, 30),
    ],
)
def test_where_reading_begins_and_ends(pushrep, orders, options, first, count):
    code, output, errors = pushrep("replay", orders.directory, "orders-0", "--format", "raw", *options)
    assert code == 0, errors
    assert output.splitlines() == [f"order {n}" for n in range(first, first + count)]


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["invoices"], 1, "has no log invoices; it has orders-0, orders-1"),
        (["orders-7"], 1, "has no log orders-7; it has"),
        (["orders", "--from", "3"], 2, "an offset and --follow need one log: give one of orders-0, orders-1"),
        (["orders-0", "--follow", "--format", "table"], 2, "--follow needs --format json or raw"),
        (["orders", "--from", "soon"], 2, "'soon' is neither earliest, latest, an offset, max-timestamp nor"),
    ],
)
def test_a_refused_read_shows_nothing_else(pushrep, orders, arguments, code, why):
    answer, output, errors = pushrep("replay", orders.directory, *arguments)
    assert (answer, output) == (code, "")
    assert why in " ".join(errors.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("1357016400000", 1357016400000),
        ("2013-01-01", 1356998400000),
        ("2013-01-01T05:00:00", 1357016400000),
        ("2013-01-01 05:00:00.250+00:00", 1357016400250),
        ("2013-01-01T00:00:00-05:00", 1357016400000),
    ],
)
def test_times_are_read_as_utc(text, time_ms):
    assert parse_time_ms(text) == time_ms


@pytest.mark.parametrize("text", ["", "soon", "-1", "1969-12-31", "9" * 30, "٣", "2013-13-01"])
def test_other_times_are_refused(text):
    with pytest.raises(ValueError, match=r"neither an ISO 8601|before 1970"):
        parse_time_ms(text)


def test_shipping_an_outbox_that_is_open_is_refused_and_of_several_it_is_skipped(pushrep, tmp_path):
    servers = ("--bootstrap-servers", "127.0.0.1:1")
    with Outbox.open(tmp_path / "a", topic="orders", partitions=1, producer="billing"):
        code, out, err = pushrep("ship", tmp_path / "a", *servers)
        assert (code, out, "is open in this very process" in err) == (1, "", True), err
    with Outbox.open_slot(tmp_path / "slots", topic="orders", partitions=1, producer="billing"):
        code, out, err = pushrep("ship", tmp_path / "slots", *servers)
        assert (code, out) == (0, "")
        assert err == f"slot-0: skipped, process {os.getpid()} has it open\n"
