"""`pushrep append --replica`: replicas hold the lines before the command ends."""

import json
import sys

import pytest

from pushrep import SegmentLog
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import read_identity


@pytest.fixture
def pushrep(capfd):
    def call(*arguments):
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def appended(pushrep):
    """The output of `pushrep append`. The command is run again, as its message tells, if replicas took too long to
    answer.
    """

    def call(*arguments):
        for _ in range(20):
            code, output, errors = pushrep("append", *arguments)
            if code == 0:
                return output
            assert "min_insync_replicas" in errors, errors
        return pytest.fail(errors)

    return call


def copied(world, directory, index):
    identity = read_identity(REAL_FILESYSTEM, directory)
    path = world.root / f"node-{index}" / identity.outbox_id / "lines-0"
    if not path.exists():  # enough members were there without this one
        return []
    with SegmentLog.open_reader(path, isolation="written") as reader:
        return [record.value for record in reader.records(0)]


def test_lines_are_on_the_replicas_when_the_command_is_done_and_later_runs_know_them(world, tmp_path, appended):
    for index in (1, 2):
        world.node(index)
    replicas = [f"--replica={world.nodes[index].address}" for index in (1, 2)]
    out, lines = tmp_path / "out", tmp_path / "lines.txt"
    lines.write_text("".join(f"line {n}\n" for n in range(100)))
    appended(out, "lines", lines, *replicas, "--acks", "all")
    both = [copied(world, out, index) for index in (1, 2)]
    assert max(both, key=len) == [b"line %d" % n for n in range(100)], "two of three members hold all"
    lines.write_text("".join(f"line {n}\n" for n in range(150)))
    assert json.loads(appended(out, "lines", lines, "--json"))["appended"] == 50
    assert max((copied(world, out, index) for index in (1, 2)), key=len) == [b"line %d" % n for n in range(150)]


def test_without_enough_replicas_nothing_is_said_to_be_appended(world, tmp_path, pushrep):
    for index in (1, 2):
        world.node(index)
        world.nodes[index].stop()
    replicas = [f"--replica={world.nodes[index].address}" for index in (1, 2)]
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n")
    code, output, errors = pushrep("append", tmp_path / "out", "lines", lines, *replicas)
    assert (code, output) == (1, "")
    assert "min_insync_replicas=2" in errors
    code, output, errors = pushrep("append", tmp_path / "out", "lines", lines, "--acks", "local")
    assert code == 0, errors
    assert output.startswith("appended 1 record")


def test_acks_without_replicas_and_half_a_certificate_are_refused_by_name(tmp_path, pushrep):
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n")
    code, _, errors = pushrep("append", tmp_path / "out", "lines", lines, "--acks", "all")
    assert code == 1
    assert "replicas" in errors
    code, _, errors = pushrep("append", tmp_path / "out", "lines", lines, "--cert", "a.pem")
    assert code == 2
    assert "all three or none" in errors
