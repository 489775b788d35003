"""Real processes on a real disk: kill -9 at each step from pending to consumed, and many writers at once."""

import os
import signal
from contextlib import contextmanager

import pytest

from pushrep import ReplayClient
from pushrep.env import RealFilesystem
from pushrep.log import SegmentLog
from pushrep.startpoints import Applied, Consumed, Startpoint, StartpointStore, Written
from tests.programs import PythonProgram
from tests.support.forks import code_in_fork

CALLS_MAX = 400


class Killing(RealFilesystem):
    """Ends the process with SIGKILL at the n-th call that changes something, before it or after it."""

    def __init__(self, at, *, after):
        self.left, self.after = at, after

    def counted(self, call):
        self.left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call()
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        return KillingFile(self, file) if writable else file

    def rename(self, source, target):
        self.counted(lambda: super(Killing, self).rename(source, target))

    def sync_directory(self, directory):
        self.counted(lambda: super(Killing, self).sync_directory(directory))


class KillingFile:
    """A file whose changes are counted."""

    def __init__(self, filesystem, file):
        self._filesystem, self._file = filesystem, file

    def __getattr__(self, name):
        if name in {"write_at", "truncate", "sync"}:
            call = getattr(self._file, name)
            return lambda *arguments: self._filesystem.counted(lambda: call(*arguments))
        return getattr(self._file, name)


def in_child(work):
    """Run `work` in a forked child; True if it ended by itself, False if it was killed."""
    code = code_in_fork(work)
    assert code in (0, -signal.SIGKILL), f"the child failed with {code}"
    return code == 0


@contextmanager
def over_logs(directory, store):
    with ReplayClient(directory).subscribe("orders", consumer="billing", startpoints=store) as consumer:
        yield consumer


@contextmanager
def over_replays(directory, store):
    with ReplayClient(directory) as client, client.subscribe("orders", consumer="billing", startpoints=store) as made:
        yield made


def consume(directory, filesystem=None, opened=over_logs):
    """Read and commit everything, ten records at a time; the offsets that were handed out."""
    store = StartpointStore.open(
        directory / "startpoints", **({} if filesystem is None else {"filesystem": filesystem})
    )
    seen = []
    with opened(directory, store) as consumer:
        while found := consumer.poll(10):
            seen += [record.offset for _, _, records in found for record in records]
            consumer.commit()
    return seen


@pytest.mark.parametrize("opened", [over_logs, over_replays], ids=["logs", "replays"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_consumer_killed_at_each_step(tmp_path, torture, after, opened):
    """The startpoint is "latest": a second resolution would find another end, because the log grows each time."""
    finished, at = False, 1 + torture.random(after).randrange(torture.count(9, 1))
    while not finished and at < CALLS_MAX:
        directory = tmp_path / str(at)
        with SegmentLog.open(directory / "orders-0") as log:
            log.append([b"x"] * 30)
            consume(directory)
            store = StartpointStore.open(directory / "startpoints")
            store.write("billing", "orders", 0, Startpoint.specific(12), "again from 12")
            finished = in_child(lambda: consume(directory, Killing(at, after=after), opened))  # noqa: B023 - at once
            log.append([b"y"] * 5)
            before = store.checkpoint(store.checkpoints()[0].reader)
            seen = consume(directory, opened=opened)
        told = f"killed {'after' if after else 'before'} change {at}"
        first = 12 if before.sequence == 0 else before.offset
        assert seen == list(range(first, 35)), told
        assert [type(fact) for fact in store.history()] == [Written, Applied, Consumed], told
        (applied,) = [fact for fact in store.history() if isinstance(fact, Applied)]
        assert (applied.offset, applied.end) in {(12, 30), (12, 35)}, told
        assert consume(directory) == [], told
        at += torture.count(9, 1)
    assert finished, "the last child must get to its end"


def test_an_operator_killed_at_each_step(tmp_path):
    """What `write` returned is stored; a write that was killed is stored as a whole or not at all; the next one
    succeeds.
    """
    at, finished = 1, False
    while not finished and at < CALLS_MAX:
        place = tmp_path / str(at)
        store = StartpointStore.open(place, filesystem=Killing(at, after=False))
        finished = in_child(lambda: store.write("billing", "orders", 0, Startpoint.specific(1), "go"))  # noqa: B023
        mine = StartpointStore.open(place)
        found = [fact.sequence for fact in mine.history()]
        assert found == [1] if finished else found in ([], [1]), at
        assert mine.write("billing", "orders", 0, Startpoint.specific(2), "go") == len(found) + 1
        assert mine.read("billing", "orders", 0).written.startpoint == Startpoint.specific(2)
        at += 1
    assert finished


WRITER = """
import sys
from pushrep.startpoints import LogFacts, Startpoint, StartpointStore

store, name, count = StartpointStore.open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
for n in range(count):
    print("written", store.write(name, "orders", n, Startpoint.specific(n), f"{name} {n}"), flush=True)
claim = store.claim("shared", "orders", 0)
log = LogFacts(start=0, end=1000 + int(name), first_at=lambda ms: None)
try:
    print("started", store.start(claim, log).offset, flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_writers_of_several_processes_lose_nothing_and_agree(tmp_path, torture):
    count, writers = torture.count(8, 200), 4
    store = StartpointStore.open(tmp_path)
    store.write("shared", "orders", 0, Startpoint.latest(), "each of them sees another end")
    running = [PythonProgram("-c", WRITER, tmp_path, number, count, has_input=True) for number in range(writers)]
    for process in running:  # all are up before any begins
        process.stdin.write("go\n")
        process.stdin.flush()
    said = []
    for process in running:
        with process:
            said.append(process.stdout.read().split())
    assert [process.returncode for process in running] == [0] * writers
    told = {str(number): [int(n) for n in words[1 : 2 * count : 2]] for number, words in enumerate(said)}
    facts = [fact for fact in store.history() if isinstance(fact, Written)]
    assert [fact.sequence for fact in facts] == list(range(1, writers * count + 2)), "no number twice, none left out"
    for name, sequences in told.items():
        mine = [fact for fact in facts if fact.target.consumer == name]
        assert [fact.sequence for fact in mine] == sequences
        assert [fact.startpoint.value for fact in mine] == list(range(count)), "in the order they were written"
    ends = [words[2 * count :] for words in said]
    started = {int(words[1]) for words in ends if words[0] == "started"}
    assert {words[0] for words in ends} <= {"started", "PartitionLost"}
    (applied,) = [fact for fact in store.history() if isinstance(fact, Applied)]
    assert started == {applied.offset}, "resolved once, whoever asks"
    assert not [fact for fact in store.history() if isinstance(fact, Consumed)]
