"""The PID epoch: after any loss of records, a reader's filter keeps every record that is appended afterwards.

`Downstream` is a real ReplayFilter for the whole test, which reads stable records. It sees each way to lose records. A
failure means that a record was appended, acknowledged and dropped as a replay.
"""

import json
import logging
import shutil
from dataclasses import replace

import pytest

from filtering import ReplayFilter, StreamMetadata
from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig, LogEndMoved, SegmentLog, list_logs
from pushrep.log.directory_files import CheckpointFile, list_segments, read_checkpoint
from pushrep.outbox import (
    DeliveryFailed,
    LogsMissing,
    LogStopped,
    NoOutbox,
    Outbox,
    begin_pid_epoch,
    identity,
    read_identity,
)
from pushrep.outbox.identity import LATER_EPOCHS, outbox_of_log, write_identity
from tests.support.outbox_arguments import outbox_arguments

CONFIG = LogConfig(preallocate_bytes=0, segment_bytes=2000)


class Downstream:
    """Everything that it ever kept, and the filter that decided it. It re-reads each log from its start every time."""

    def __init__(self, directory):
        self.directory, self.filter, self.kept = directory, ReplayFilter(), set()

    def read(self):
        for topic, partition in list_logs(self.directory):
            with SegmentLog.open_reader(self.directory / f"{topic}-{partition}") as log:
                for record in log.records(log.log_start_offset):
                    if self.filter.admit(record.key, partition):
                        self.kept.add(record.value)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "outbox"


@pytest.fixture
def downstream(home):
    return Downstream(home)


def opened(home, **settings):
    return Outbox.open(home, "orders", 2, "billing", **outbox_arguments(**{"log_config": CONFIG, **settings}))


def append(home, word, count, **settings):
    """Append to both partitions, one batch a record, and close; (values, the PID that they were appended under)."""
    with opened(home, **settings) as outbox:
        values = {f"{word} {partition} {n}".encode() for n in range(count) for partition in (0, 1)}
        for value in sorted(values):
            outbox.append(int(value.split()[1]), value).result(60)
        return values, outbox.pid


def run(*arguments):
    return cli_main.run([str(argument) for argument in arguments])


def damage(home, offset):
    with SegmentLog.open(home / "orders-1", CONFIG) as log:
        base, position = locate(log, offset)
    path = home / "orders-1" / f"{base:020d}.log"
    data = bytearray(path.read_bytes())
    data[position + 70] ^= 1
    path.write_bytes(data)
    (home / ".pushrep_cleanshutdown").unlink()  # as after a kill


def locate(log, offset):
    base = max(base for base in list_segments(REAL_FILESYSTEM, log.path) if base <= offset)
    return base, sum(batch.header.size_bytes for batch in log.batches(base, offset)) if offset > base else 0


# -- ways to lose records; each leaves the outbox closed ---------------------------------------------------------------


def truncate_offline(home):
    with SegmentLog.open(home / "orders-1", CONFIG) as log:
        log.truncate_to(5, force=True)


def truncate_and_regrow_offline(home):
    """A tool cuts the log, and writes other records after the cut."""
    with SegmentLog.open(home / "orders-1", CONFIG) as log:
        log.truncate_to(5, force=True)
        log.append([b"by hand"] * 3)


def truncate_live(home):
    with opened(home) as outbox:
        outbox.log(1).truncate_to(5, force=True)


def truncate_live_and_go_on(home):
    with opened(home) as outbox:
        outbox.log(1).truncate_to(5, force=True)
        with pytest.raises(DeliveryFailed) as failed:
            outbox.append(1, b"under the old PID").result(60)
        assert isinstance(failed.value.__cause__, LogEndMoved)
        with pytest.raises(LogStopped, match=r"ends at offset 5, the append was made for 20; .*open the outbox again"):
            outbox.append(1, b"more")
        with pytest.raises(LogStopped, match="cut at 5"):
            outbox.last_metadata(outbox.pid, 1)
        outbox.append(0, b"the other partition goes on").result(60)


def truncate_by_the_tool(home):
    assert run("log", "truncate", home, "orders-1", 5, "--force") == 0


def truncate_twice(home):
    truncate_by_the_tool(home)
    assert run("log", "truncate", home, "orders-1", 3, "--force") == 0


def repair_by_a_cut(home):
    damage(home, 7)
    assert run("log", "repair", home, "orders-1", "--cut", "orders-1") == 0


def repair_where_it_is_whole(home):
    assert run("log", "repair", home, "orders-1", "--cut-at", 7) == 0


def repair_from_a_copy_that_ends_earlier(home):
    """The damaged tail comes back as far as the copy has it; what was published would ask for a copy with all of it."""
    copy = home.parent / "copy" / "orders-1"
    shutil.copytree(home / "orders-1", copy)
    with SegmentLog.open(copy, CONFIG) as log:
        log.truncate_to(12, force=True)
    with SegmentLog.open(home / "orders-1", CONFIG) as log:
        base, position = locate(log, 10)
        later = [n for n in list_segments(REAL_FILESYSTEM, log.path) if n > base]
    path = home / "orders-1" / f"{base:020d}.log"
    path.write_bytes(path.read_bytes()[: position + 30])
    for n in later:
        (home / "orders-1" / f"{n:020d}.log").unlink()
    forget_the_recovery_point(home)
    assert run("log", "repair", home, "orders-1", "--from-copy", copy) == 1, "20 is needed, and it ends at 12"
    (home / ".pushrep_published").unlink()
    assert run("log", "repair", home, "orders-1", "--from-copy", copy) == 0


def quarantine_live(home):
    damage(home, 7)
    with opened(home) as outbox:
        outbox.log(1).quarantine()


def remove_a_partition(home):
    shutil.rmtree(home / "orders-1")
    with pytest.raises(LogsMissing) as refused:
        opened(home)
    assert refused.value.ends == {"orders-1": 20}
    opened(home, accept_loss=True).close()


def remove_a_partition_and_open_its_log(home):
    """A tool creates the directory again before the outbox can detect that it is missing."""
    shutil.rmtree(home / "orders-1")
    SegmentLog.open(home / "orders-1", CONFIG).close()


def remove_every_partition(home):
    for n in (0, 1):
        shutil.rmtree(home / f"orders-{n}")
    assert run("append", home, "orders", "/dev/null") == 1
    assert run("append", home, "orders", "/dev/null", "--accept-loss") == 0


def restore_a_partition_from_an_older_copy(home):
    shutil.rmtree(home / "orders-1")
    shutil.copytree(home.parent / "backup" / "orders-1", home / "orders-1")
    with opened(home) as outbox, pytest.raises(LogStopped, match="damaged from offset 8 on"):
        outbox.append(1, b"it was never to end here")
    assert run("log", "repair", home, "orders-1", "--cut-at", 8) == 0


def restore_everything_from_an_older_copy(home):
    shutil.rmtree(home)
    shutil.copytree(home.parent / "backup", home)
    assert run("log", "new-epoch", home) == 0


def tear_what_was_synced(home):
    """The disk lied: the newest batch is not whole, below what readers were shown; the recovery point is behind it."""
    path = home / "orders-1"
    newest = max(path.glob("*.log"))
    newest.write_bytes(newest.read_bytes()[:-5])
    forget_the_recovery_point(home)


def lose_what_was_synced(home):
    """The state published since the last start of the machine has the loss, so it is damage, and the operator gives it
    up.
    """
    tear_what_was_synced(home)
    assert run("log", "repair", home, "orders-1", "--cut", "orders-1") == 0


def forget_the_recovery_point(home):
    """A kill leaves it behind what was flushed; here as far behind as can be."""
    (home / ".pushrep_cleanshutdown").unlink()
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
        (home / checkpoint.value).unlink()


def lose_every_note_beside_the_log(home):
    """The same loss, and the directory's files are gone, too: the secondary index of the log still shows it."""
    tear_what_was_synced(home)
    (home / ".pushrep_published").unlink()


WAYS = [
    truncate_offline,
    truncate_and_regrow_offline,
    truncate_live,
    truncate_live_and_go_on,
    truncate_by_the_tool,
    truncate_twice,
    repair_by_a_cut,
    repair_where_it_is_whole,
    repair_from_a_copy_that_ends_earlier,
    quarantine_live,
    remove_a_partition,
    remove_a_partition_and_open_its_log,
    remove_every_partition,
    restore_a_partition_from_an_older_copy,
    restore_everything_from_an_older_copy,
    lose_what_was_synced,
    lose_every_note_beside_the_log,
]


@pytest.mark.parametrize("lose", WAYS, ids=lambda way: way.__name__)
def test_a_reader_keeps_what_comes_after_a_loss(home, downstream, lose):
    first, pid = append(home, "first", 8)
    shutil.copytree(home, home.parent / "backup")
    (home.parent / "backup" / ".lock").unlink()
    second, _ = append(home, "second", 12)
    downstream.read()
    assert downstream.kept == first | second
    lose(home)
    after, later_pid = append(home, "after", 10)
    downstream.read()
    assert after <= downstream.kept, f"dropped as replays: {sorted(after - downstream.kept)}"
    assert later_pid != pid
    more, last_pid = append(home, "more", 10)
    downstream.read()
    assert more <= downstream.kept
    assert last_pid == later_pid, "one loss, one PID"


@pytest.mark.parametrize("durability", Durability)
def test_without_a_loss_the_pid_stays(home, downstream, durability):
    _, pid = append(home, "first", 5, durability=durability)
    with (home / "orders-1" / f"{0:020d}.log").open("ab") as file:
        file.write(b"torn by a kill")
    (home / ".pushrep_cleanshutdown").unlink()
    with opened(home, durability=durability) as outbox:
        assert outbox.log(1).recovery.cut is not None
        assert outbox.pid == pid
    assert not (home / CheckpointFile.GIVEN_UP.value).exists()


def test_the_positions_of_the_old_pid_stay_known(home):
    _, pid = append(home, "first", 8)
    truncate_offline(home)
    with opened(home) as outbox:
        assert (outbox.last_metadata(pid, 0), outbox.last_metadata(pid, 1)) == (7, 4)
        assert outbox.last_metadata(outbox.pid, 1) is None
        outbox.append(1, b"new").result(60)
        assert outbox.last_metadata(outbox.pid, 1) == 5
    with opened(home) as outbox:
        assert (outbox.last_metadata(pid, 1), outbox.last_metadata(outbox.pid, 1)) == (4, 5)


def test_what_was_cut_and_regrown_by_a_tool_is_read_again(home):
    """The positions stored beside the log end below it, and include records that are gone."""
    with opened(home) as outbox:
        outbox.append_many(1, [b"x"] * 3, metadata=StreamMetadata(7, 1, 10)).result(60)
        outbox.append_many(1, [b"x"] * 3, metadata=StreamMetadata(7, 1, 13)).result(60)
    with SegmentLog.open(home / "orders-1", CONFIG) as log:
        log.truncate_to(3, force=True)
        log.append([b"by hand"] * 7)
    with opened(home) as outbox:
        assert outbox.last_metadata(7, 1) == 12


def test_the_epoch_is_on_disk_before_the_call_for_it_is_struck_out(home, monkeypatch):
    append(home, "first", 8)
    truncate_offline(home)
    seen = []
    remember = "pushrep.log.directory.LogDirectory.remember"

    def stop(held, name, offsets):
        if CheckpointFile.GIVEN_UP in offsets:
            seen.append((read_identity(REAL_FILESYSTEM, home).pid_epoch, offsets))
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(remember, stop)
        with pytest.raises(KeyboardInterrupt):
            opened(home)
    assert seen == [(1, {CheckpointFile.GIVEN_UP: 0})]
    with opened(home) as outbox:
        assert outbox.identity.pid_epoch == 2, "raised once more: that costs no record"
    assert read_checkpoint(home, CheckpointFile.GIVEN_UP) == {"orders-1": 0}


def test_an_older_outbox_file_is_noticed_by_what_the_logs_hold(home, downstream, caplog):
    first, _ = append(home, "first", 20)
    old = (home / "outbox.json").read_bytes()
    downstream.read()
    truncate_offline(home)
    second, pid = append(home, "second", 2)
    downstream.read()
    (home / "outbox.json").write_bytes(old)
    third, later_pid = append(home, "third", 6)
    downstream.read()
    assert first | second | third <= downstream.kept
    assert later_pid != pid
    assert read_identity(REAL_FILESYSTEM, home).pid_epoch > 1
    assert "outbox.json is an older copy" in caplog.text


@pytest.mark.parametrize("behind", [1, LATER_EPOCHS])
def test_the_epoch_after_an_older_file_is_above_all_that_the_logs_hold(home, monkeypatch, behind):
    """Wherever the leap leads, the least one counted."""
    monkeypatch.setattr(identity.secrets, "randbelow", lambda _: 0)
    opened(home).close()
    older = read_identity(REAL_FILESYSTEM, home)
    write_identity(REAL_FILESYSTEM, home, replace(older, pid_epoch=behind))
    append(home, "later", 1)
    write_identity(REAL_FILESYSTEM, home, older)
    with opened(home) as outbox:
        assert outbox.identity.pid_epoch == behind + 1


def test_a_log_that_is_no_partition_of_the_outbox_beside_it_has_nothing_said_of_it(home):
    append(home, "first", 1)
    assert outbox_of_log(home / "orders-1")["pid_epoch"] == 0
    assert outbox_of_log(home / "orders-2") is None
    (home / "outbox.json").write_bytes(b"{")
    assert outbox_of_log(home / "orders-1") is None, "its log can be looked at all the same"


def test_a_restored_copy_leaps_over_the_epochs_that_it_does_not_know(home, downstream):
    """The lost directory had used the next epochs itself."""
    append(home, "first", 4)
    shutil.copytree(home, home.parent / "backup")
    append(home, "second", 20)
    truncate_offline(home)
    append(home, "third", 20)
    downstream.read()
    shutil.rmtree(home)
    shutil.copytree(home.parent / "backup", home)
    (home / ".lock").unlink()
    begin_pid_epoch(home)
    fourth, _ = append(home, "fourth", 20)
    downstream.read()
    assert fourth <= downstream.kept


def test_a_partition_that_was_never_made_costs_a_pid_and_no_word(home, caplog):
    """A crash while the outbox was made: nothing is known of the directory, and nothing is lost."""
    opened(home).close()
    for n in (0, 1):
        shutil.rmtree(home / f"orders-{n}")
    with opened(home) as outbox:
        assert outbox.identity.pid_epoch == 1
    assert "orders-0 was missing; orders-1 was missing" in caplog.text


def test_a_refused_open_changes_nothing(home):
    append(home, "first", 3)
    shutil.rmtree(home / "orders-1")
    names = {path.name for path in home.iterdir()}
    identity = (home / "outbox.json").read_bytes()
    for _ in range(2):
        with pytest.raises(LogsMissing, match=r"orders-1 \(records up to offset 3\) is missing; .*accept_loss=True"):
            opened(home)
    assert {path.name for path in home.iterdir()} - names <= {CheckpointFile.GIVEN_UP.value}
    assert (home / "outbox.json").read_bytes() == identity


def test_tools_say_what_a_cut_means(home, capsys):
    append(home, "first", 20)
    assert run("log", "truncate", home, "orders-1", 5, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["outbox"]["next_pid_epoch"] == 1
    assert run("log", "repair", home, "orders-1", "--cut-at", 4) == 0
    assert "seen offsets up to 20: the outbox's next open begins PID epoch 1" in capsys.readouterr().out
    assert run("log", "repair", home, "orders-1", "--cut-at", 3, "--json") == 0
    outbox = json.loads(capsys.readouterr().out)["outbox"]
    assert (outbox["pid_epoch"], outbox["next_pid_epoch"], outbox["given_up_to"]) == (0, 1, 20)
    assert run("log", "describe", home, "orders-1") == 0
    shown = capsys.readouterr().out
    assert f"producer billing, PID {outbox['pid']}, epoch 0" in shown
    assert "given up to          20" in shown
    opened(home).close()
    assert run("log", "describe", home, "orders-1", "--json") == 0
    facts = json.loads(capsys.readouterr().out)["outbox"]
    assert (facts["pid_epoch"], facts["given_up_to"]) == (1, 0)
    assert run("log", "new-epoch", home / "nowhere") == 1
    assert "no outbox in" in capsys.readouterr().err
    assert run("log", "new-epoch", home, "--json") == 0
    assert json.loads(capsys.readouterr().out)["pid_epoch"] > 1


def test_a_log_that_is_no_outboxes_has_nothing_said_of_one(tmp_path, capsys):
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.append([b"x"] * 3)
        log.append([b"x"] * 3)
    assert run("log", "truncate", tmp_path, "orders-0", 3, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["outbox"] is None


def test_an_outbox_that_is_not_there_is_made_or_refused(home, caplog):
    caplog.set_level(logging.INFO, "pushrep.outbox")
    with pytest.raises(NoOutbox, match="create=True"):
        opened(home, create=False)
    assert not home.exists(), "a mistyped path leaves nothing behind"
    opened(home).close()
    assert f"a new outbox was made in {home}" in caplog.text
    caplog.clear()
    opened(home, create=False).close()
    assert "new outbox" not in caplog.text
