"""Mistakes in calls and on the command line: each gives one line that names what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import pushrep
from filtering import StreamMetadata
from pushrep import (
    AsyncOutbox,
    Durability,
    LogConfig,
    Outbox,
    ReplayClient,
    ReplicaNode,
    SegmentLog,
    StartpointStore,
)
from pushrep.outbox.configured import outbox_settings
from pushrep.outbox.member_changes import add_member, remove_member
from pushrep.testing import FakeOutbox
from tests.house.test_install import BLOCK_EXTRAS
from tests.support.outbox_arguments import outbox_arguments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outbox(tmp_path_factory):
    with Outbox.open(tmp_path_factory.mktemp("mistakes") / "o", topic="orders", partitions=2, producer="p") as opened:
        opened.append(0, b"a").result(60)
        yield opened


def opening(**settings):
    given = {"directory": "unused", "topic": "t", "partitions": 1, "producer": "p"} | settings
    return lambda _: Outbox.open(**outbox_arguments(**given))


def mistyped_table():
    path = Path("mistyped.toml")
    path.write_text('[outbx]\ntopic = "t"\n')
    return path


API = {
    "a path of None": (opening(directory=None), "directory: give a path, not None"),
    "an empty path": (opening(directory=""), "directory: give a path, not ''"),
    "a log's path of None": (lambda _: SegmentLog.open(None), "directory: give a path, not None"),
    "a reader's path of None": (lambda _: SegmentLog.open_reader(None), "directory: give a path, not None"),
    "a log's path of no log": (lambda _: SegmentLog.open_reader("nowhere/orders-0"), "no such directory"),
    "a log's name without a number": (lambda _: SegmentLog.open("nowhere/orders"), "<topic>-<partition>"),
    "no outbox where one has to be": (opening(create=False, directory="nowhere"), "create=True"),
    "a file as directory": (opening(directory=__file__), "it is a file"),
    "a topic with a blank": (opening(topic="my orders"), "topic: 'my orders' is no topic name"),
    "no partitions": (opening(partitions=0), "partitions: give a whole number between 1 and"),
    "partitions as text": (opening(partitions="4"), "partitions: give a whole number"),
    "no producer": (opening(producer=""), "producer: give a text of 1 to 2000 printable characters"),
    "durability as text": (opening(durability="flushed"), "durability: give Durability.BUFFERED or Durability.FLUSHED"),
    "durability as a boolean": (opening(durability=True), "durability: give Durability.BUFFERED or Durability.FLUSHED"),
    "codec as text": (lambda _: LogConfig(codec="zstd"), "codec: give Codec.NONE or"),
    "acks without replicas": (opening(acks=pushrep.Acks.ALL), "acks: ALL needs replicas"),
    "acks as text": (opening(acks="all"), "acks: give Acks.LOCAL or Acks.ALL"),
    "replicas as text": (opening(replicas="host:7400"), "replicas: give a list of texts"),
    "a replica without a port": (opening(replicas=["host"]), "replicas: "),
    "the same replica twice": (opening(replicas=["h:1", "h:1"]), "replicas: give each address once"),
    "kafka as text": (opening(kafka="broker:9092"), "kafka: give a KafkaDestination"),
    "another carrier": (opening(carrier="value"), "carrier: 'value' is neither 'key' nor 'header'"),
    "a negative linger": (opening(linger_ms=-1), "linger_ms: give a whole number between 0"),
    "seconds for milliseconds": (opening(block_ms=0.5), "block_ms: give a whole number between 0"),
    "a small buffer": (opening(buffer_bytes=10), "buffer_bytes: 10 is less than one batch"),
    "a negative retention": (lambda _: LogConfig(retention_ms=-5), "retention_ms: give a whole number of at least -1"),
    "log_config as dict": (opening(log_config={"segment_bytes": 5}), "log_config: give a LogConfig, not dict"),
    "a disk limit above 100": (
        lambda _: LogConfig(disk_refuse_percent=101),
        "disk_refuse_percent: give a whole number",
    ),
    "disk limits that fall": (lambda _: LogConfig(disk_warn_percent=99), "they rise from 0 to 100"),
    "a partition that is none": (lambda box: box.append(2, b""), "partition: 2 is not one of the 2"),
    "a partition as text": (lambda box: box.append("0", b""), "partition: '0' is not one of the 2"),
    "a value as text": (lambda box: box.append(0, "text"), "value: "),
    "headers as dict": (lambda box: box.append(0, b"", headers={"a": b"1"}), "headers=list(headers.items())"),
    "headers that are no pairs": (lambda box: box.append(0, b"", headers=["ab"]), "a header is (name, bytes or None)"),
    "a key where the metadata is": (lambda box: box.append(0, b"", key=b"mine"), "key: "),
    "a time as text": (lambda box: box.append(0, b"", timestamp_ms="now"), "timestamp_ms: "),
    "metadata as tuple": (lambda box: box.append(0, b"", metadata=(1, 0, 0)), "metadata: give a StreamMetadata"),
    "metadata of another partition": (
        lambda box: box.append(0, b"", metadata=StreamMetadata(1, 1, 0)),
        "metadata: ",
    ),
    "one value for many": (lambda box: box.append_many(0, b"abc"), "values: give a list of values"),
    "no values": (lambda box: box.append_many(0, []), "values: "),
    "its own lock": (lambda box: Outbox.open(box.directory, "orders", 2, "p"), "open in this very process"),
    "other partitions": (lambda box: Outbox.open(box.directory, "orders", 3, "p"), "partitions"),
    "shipping without a destination": (lambda box: box.wait_shipped(1), "opened without a destination"),
    "a read beyond the end": (lambda box: list(box.log(0).records(99)), "99"),
    "a typing error in a name": (lambda _: pushrep.Outbux, "Did you mean: 'Outbox'?"),
    "a replay of nothing": (lambda _: ReplayClient(None), "None"),
    "a read from an offset as text": (lambda box: box.log(0).records("0"), "start: give an offset, not '0'"),
    "a read up to an offset as text": (lambda box: box.log(0).records(0, "1"), "end: give an offset, not '1'"),
    "a read of bytes from an offset as text": (lambda box: box.log(0).read("0", 1), "start: give an offset, not '0'"),
    "a read by a time as text": (
        lambda box: box.log(0).offset_for_timestamp("2026-01-01"),
        "timestamp_ms: give whole milliseconds since 1970, not '2026-01-01'",
    ),
    "a wait as text": (lambda box: box.append(0, b"").result("x"), "timeout: give seconds or None, not 'x'"),
    "a flush's wait as text": (lambda box: box.flush("x"), "timeout: give seconds or None, not 'x'"),
    "a wait for the topic as text": (lambda box: box.wait_shipped("x"), "timeout: give seconds or None, not 'x'"),
    "a new member's wait as text": (
        lambda box: add_member(box.facts, "h:1", wait_s="x"),
        "timeout: give seconds or None, not 'x'",
    ),
    "a leaving member's wait as a boolean": (
        lambda box: remove_member(box.facts, 1, wait_s=True),
        "timeout: give seconds or None, not True",
    ),
    "a wait of a test's outbox as text": (
        lambda _: FakeOutbox().flush("x"),
        "timeout: give seconds or None, not 'x'",
    ),
    "a wait of a test's topic as text": (
        lambda _: FakeOutbox().wait_shipped("x"),
        "timeout: give seconds or None, not 'x'",
    ),
    "a port that is none": (opening(replicas=["host:70000"]), "70000 is no port: give 0 to 65535"),
    "an async outbox used as one that is open": (
        lambda _: AsyncOutbox.open("o", "t", 1, "p").append(0, b""),
        "write `await AsyncOutbox.open(...)` or `async with AsyncOutbox.open(...) as outbox:`",
    ),
    "settings that are not enough": (
        lambda _: Outbox.open(**outbox_settings(None, {"PUSHREP_TOPIC": "t", "PUSHREP_PARTITIONS": "1"})),
        "directory: has to be given, in the table [outbox] of the file or as PUSHREP_DIRECTORY; missing, too: producer",
    ),
    "a file of settings that is not there": (
        lambda _: outbox_settings("nowhere.toml", {}),
        "file: can't read 'nowhere.toml': No such file",
    ),
    "a secret's file that is not there": (
        lambda _: outbox_settings(None, {"PUSHREP_KAFKA_SASL_PASSWORD_FILE": "/run/no-secret"}),
        "PUSHREP_KAFKA_SASL_PASSWORD_FILE: can't read '/run/no-secret': No such file",
    ),
    "a node in an outbox": (
        lambda box: ReplicaNode(box.directory),
        "of an outbox: give a node one of its own",
    ),
    "a node's address for its settings": (lambda _: ReplicaNode("d", "127.0.0.1:0"), "settings: give a NodeSettings"),
    "a startpoint as text": (
        lambda box: StartpointStore.open(box.directory / "startpoints").write("c", "orders", 0, "earliest", "why"),
        "startpoint: give a Startpoint, as Startpoint.earliest(), not 'earliest'",
    ),
    "an async outbox by its class": (lambda _: AsyncOutbox("dir"), "`await AsyncOutbox.open(directory, ...)`"),
    "a log by its class": (lambda _: SegmentLog("dir"), "is made by SegmentLog.open(directory)"),
    "an outbox among the files of a log": (
        lambda box: Outbox.open(box.directory / "orders-0", "orders", 2, "p"),
        "orders-0 is a single log: name the directory above it",
    ),
    "a node among the files of a log": (lambda box: ReplicaNode(box.directory / "orders-0"), "is a single log"),
    "a file as a node's directory": (lambda _: ReplicaNode(__file__), "is a file: give a node one of its own"),
    "a path with a NUL": (opening(directory="a\0b"), "directory: no path has a NUL in it"),
    "a cut at an offset as text": (lambda box: box.log(0).truncate_to("1"), "offset: give an offset, not '1'"),
    "a read of so many bytes as text": (lambda box: box.log(0).read(0, "x"), "max_bytes: give a number of bytes"),
    "a replay of a file": (lambda _: ReplayClient(__file__), "is a file: give a directory of logs"),
    "startpoints at None": (lambda _: StartpointStore.open(None), "location: give a path, not None"),
    "a mistyped table of settings": (
        lambda _: outbox_settings(mistyped_table(), {}),
        "has no table [outbox], but [outbx]",
    ),
    "append to a log as text": (lambda box: box.log(0).append("text", durability=Durability.FLUSHED), "bytes"),
}


@pytest.mark.parametrize("mistake", API)
def test_the_api_says_what_to_do(outbox, mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, said = API[mistake]
    with pytest.raises((pushrep.PushrepError, ValueError, TypeError, AttributeError)) as refused:
        make(outbox)
    assert said in str(refused.value), refused.value
    assert "\n" not in str(refused.value)


COMMANDS = {
    "a typing error": ("apend out t x", 2, "did you mean append?"),
    "a typing error below": ("log purg out", 2, "Did you mean 'purge'?"),
    "an option's typing error": ("replay out t --formt raw", 2, "--format"),
    "a log's setting's typing error": ("append out t x --log retentoin_ms=5", 2, "did you mean retention_ms?"),
    "a log's setting without a value": ("append out t x --log retention_ms", 2, "NAME=VALUE"),
    "a log's setting as text": ("append out t x --log retention_ms=week", 2, "retention_ms: give a whole number"),
    "a log's setting out of range": ("append out t x --log disk_warn_percent=101", 2, "disk_warn_percent: give"),
    "no such directory to read": ("replay nowhere t", 1, "nowhere"),
    "no such file": ("append out t nowhere.txt", 1, "nowhere.txt"),
    "a directory as input": ("append out t .", 2, "is a directory"),
    "no outbox to ship": ("ship nowhere --bootstrap-servers 127.0.0.1:1", 1, "nowhere"),
    "a time that is none": ("log purge . --before soon", 2, "nor an ISO 8601 time"),
    "an offset of many logs": ("log purge . --before 5", 2, "an offset needs one LOG"),
    "no log to verify": ("log verify nowhere", 1, "nowhere"),
    "a replay from nowhere": ("replay nowhere t-0 --from soon", 1, "no directory of logs, and no address"),
    "no marks": ("marks show nowhere", 1, "there are none"),
    "a node's address": ("replica serve d --listen nowhere", 2, "nowhere"),
    "a node in an outbox": ("replica serve made --listen 127.0.0.1:0", 1, "the directory of an outbox"),
    "a promotion of nothing": ("promote nowhere", 2, "does not exist"),
    "a port that is none to listen at": ("replica serve d --listen 127.0.0.1:70000", 2, "70000 is no port"),
    "a port that is none of a broker": ("ship made --bootstrap-servers b:99999", 1, "ports up to 65535"),
    "a port that is none of a node": ("replay 127.0.0.1:99999 t-0", 1, "99999 is no port: give 0 to 65535"),
    "a member where there are none": ("replica add made 127.0.0.1:1", 1, "pushrep append --replica HOST:PORT"),
    "no member to remove": ("replica remove made 1", 1, "pushrep append --replica HOST:PORT"),
    "moved, and the original is there": ("replica moved copied", 1, "made, which is still there"),
    "no outbox for a new epoch": ("log new-epoch nowhere", 1, "there is no outbox in nowhere: look at the path\n"),
    "a file for an outbox": ("log new-epoch file", 1, "there is no outbox in file: look at the path\n"),
    "one log for an outbox": ("log new-epoch made/t-0", 1, "it is a single log: name the directory above it"),
    "slots for an outbox": ("log new-epoch workers", 1, "each of them an outbox: name one, as workers/slot-0"),
    "slots for an outbox to rebase": ("outbox repartition workers", 1, "name one, as workers/slot-0"),
    "an append into a log": ("append made/t-0 t file", 1, "made/t-0 is a single log"),
    "a node in a log": ("replica serve made/t-0 --listen 127.0.0.1:0", 1, "made/t-0 is a single log"),
    "one log to read from": ("replay made/t-0 t", 1, "made/t-0 is one log: give its directory and its name, made t-0"),
    "no log to purge": ("log purge . --before 2026-01-01", 1, "is no log"),
    "a copy that is nowhere": ("log verify made --against nowhere", 2, "for --against: nowhere is no directory"),
    "a dump that ends before it begins": ("log dump made t-0 --from 3 --to 1", 2, "1 is below --from 3"),
    "a dump from beyond the end": ("log dump made t-0 --from 9", 0, "nothing at or above --from 9"),
    "a replay that ends before it begins": ("replay made t-0 --from 3 --until 1", 2, "1 is below --from 3"),
    "acks without replicas": (
        "append out t file --acks all",
        1,
        "acks: ALL needs replicas=[...], or --replica of a command",
    ),
    "a replay of another log": ("replay made t-9", 1, "made has no log t-9; it has t-0"),
    "a replay of a file's log": ("replay file t-0", 1, "file is a file: give a directory of logs"),
    "no certificate": ("recording list h:1 --cert n --key n --ca n", 2, "cert: n can't be read: No such file"),
    "no certificate in the file": (
        "recording list h:1 --cert file --key file --ca file",
        2,
        "ca: file holds no certificate in PEM",
    ),
    "startpoints of nothing": ("startpoint list nowhere", 2, "no directory nowhere: give the directory of the logs"),
    "a topic where the logs are named": ("startpoint list kafka:t", 2, "give the store as --store kafka:t"),
    "marks in a file that is no database": ("marks show sqlite:file --table t", 1, "file is not a database"),
    "moved, and it is the original": ("replica moved made", 1, "it is the original"),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_the_command_line_says_what_to_do(mistake, tmp_path, monkeypatch, capsys):
    from pushrep.cli.main import run

    monkeypatch.chdir(tmp_path)
    line, code, said = COMMANDS[mistake]
    Path("file").write_text("no database, no PEM, no directory\n" * 100)
    if "workers" in line:
        Outbox.open_slot("workers", "t", 1, "p").close()
    if "made" in line or "copied" in line:
        Outbox.open("made", "t", 1, "pushrep-append").close()
        shutil.copytree("made", "copied")
        capsys.readouterr()
    got = run(line.split())
    told = capsys.readouterr().err
    assert (got, said in told) == (code, True), told
    assert "Traceback" not in told
    if code == 1:
        assert told.startswith("error: ")
        assert told.count("\n") == 1, "one line"


def test_a_closed_outbox_is_called_closed(tmp_path, capsys):
    from pushrep.cli.main import run

    Outbox.open(tmp_path / "made", "t", 1, "p").close()
    assert run(["status", str(tmp_path / "made")]) == 0
    assert ", closed: no process has it open\n" in capsys.readouterr().out


def test_no_help_shows_how_it_was_laid_out_or_ends_a_summary_in_dots(capsys, monkeypatch):
    """A raw docstring kept click's word for "as it is" as two characters."""
    from pushrep.cli.main import cli, run

    monkeypatch.setenv("COLUMNS", "80")

    def shown(command, path):
        assert run([*path, "--help"]) == 0
        text = capsys.readouterr().out
        assert "\\b" not in text, path
        assert "\b" not in text, path
        _, _, summaries = text.partition("\nCommands:\n")
        assert summaries.count("...") == 0, path
        for name in getattr(command, "commands", {}):
            assert len(command.commands[name].get_short_help_str(limit=200)) <= 45, [*path, name]
            shown(command.commands[name], [*path, name])

    shown(cli, [])
    context = click.Context(cli)
    for name in cli.list_commands(context):
        shown(cli.get_command(context, name), [name])


def python(code, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_missing_extra_is_answered_by_the_command_that_brings_it(tmp_path):
    """The command in the message installs from the same place as this pushrep."""
    code = (
        BLOCK_EXTRAS
        + """
from filtering.extras import install_command
from pushrep.cli.main import run
import importlib
assert install_command("aiokafka").startswith("pip install") and "[kafka]" in install_command("aiokafka")
for module, package in {"filtering.consumers.aiokafka": "aiokafka", "filtering.consumers.confluent": "confluent_kafka",
        "partitioner.confluent": "confluent_kafka"}.items():
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert f"{module} needs the Python package {package!r}" in str(error), error
        assert install_command(package) in str(error), error
    else:
        raise SystemExit(module)
from pushrep import KafkaDestination, Outbox
try:
    Outbox.open("o", "t", 1, "p", kafka=KafkaDestination(bootstrap_servers="127.0.0.1:1"))
except ModuleNotFoundError as error:
    assert "Outbox.open(kafka=...) needs the Python package" in str(error), error
else:
    raise SystemExit("opened")
with Outbox.open("shipped", "t", 1, "p") as outbox:
    outbox.append(0, b"a").result(60)
for line in ("ship shipped --bootstrap-servers 127.0.0.1:1", "marks show postgresql://h/d --table t",
        "startpoint list . --store kafka:t --bootstrap-servers 127.0.0.1:1"):
    print("--", line, file=sys.stderr)
    assert run(line.split()) == 1, line
"""
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for said in done.stderr.split("-- ")[1:]:
        _, _, answer = said.partition("\n")
        assert answer.startswith("error: "), said
        assert "pip install" in answer, said
        assert answer.count("\n") == 1, said


SHADOWS = {
    "filtering": "import pushrep",
    "filtering seen by partitioner": "import partitioner",
    "spark_jobs": "import sys; from pushrep.cli.main import run; sys.exit(run(['marks', 'show', 'x']))",
}


@pytest.mark.parametrize("shadow", SHADOWS)
def test_a_package_of_the_users_own_that_hides_ours_is_named(tmp_path, shadow):
    name = shadow.split()[0]
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("mine = 1\n")
    done = python(SHADOWS[shadow], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"{tmp_path / name} hides the package {name!r} of pushrep, {ROOT / name}" in last


def test_who_does_not_need_the_hidden_package_is_not_disturbed(tmp_path):
    for name in ("spark_jobs", "partitioner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = 1\n")
    code = "import pushrep, spark_jobs\nassert spark_jobs.mine\npushrep.Outbox.open('o', 't', 1, 'p').close()"
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_errors_of_spark_jobs_name_a_worker_slot_as_people_do():
    """The number of the log among all slots, 1<<30 and more, would tell a user nothing."""
    from pushrep.log.directory_files import parse_shown_partition
    from spark_jobs.decide import epochs_mixed
    from spark_jobs.errors import FrameChanged

    number = parse_shown_partition("slot-7/3")
    for error in (FrameChanged(number, 0, 5, 5, 4), epochs_mixed("t", number, [1, 2])):
        assert "partition slot-7/3" in str(error)
    assert "partition 3 of t" in str(epochs_mixed("t", 3, [5]))
