"""Kafka's DumpLogSegments accepts every file after any crash and a reopening: one Java machine for all of the logs.

A child dies by its own kill -9 at the nth call that changes the disk, a write half done; n runs over a whole life:
appends, rolls, flushes, a cut, a close, a second opening. Then tails are torn by hand.
"""

import os
import signal
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.published import PUBLISHED_NAME
from pushrep.records import Codec
from tests.kafka.cluster import missing
from tests.kafka.dump_tool import dump_segments
from tests.support.forks import fork

pytestmark = [pytest.mark.java, pytest.mark.slow]

LAYOUT = {"segment_bytes": 3000, "batch_bytes": 400, "index_interval_bytes": 300}
CHANGING = {"write_at", "truncate", "allocate", "sync", "rename", "remove", "sync_directory", "make_directory", "open"}


class Clock:
    """The machine's; not the system clock itself, so that the flusher's thread does not blur which call is the nth."""

    wall_ms = staticmethod(SYSTEM_CLOCK.wall_ms)
    monotonic_ms = staticmethod(SYSTEM_CLOCK.monotonic_ms)


class Dying:
    """A file system, or one of its files, in a process that dies at the nth call that changes something."""

    def __init__(self, real, calls):
        self._real, self._calls = real, calls

    def __getattr__(self, name):
        method = getattr(self._real, name)
        if name not in CHANGING | {"lock"}:
            return method

        def call(*args, **kwargs):
            changes = name in CHANGING and (name != "open" or kwargs.get("create", False))
            self._calls[0] -= changes
            if self._calls[0] == 0:
                if name == "write_at":
                    data, position = args
                    method(bytes(data)[: len(data) // 2], position)
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(*args, **kwargs)
            return Dying(result, self._calls) if name in {"open", "lock"} else result

        return call


def live(path, config, filesystem, report):
    """A whole life of a log; `report` gets each end offset that was acknowledged, or -1 - end for a cut."""
    for half in range(2):
        with SegmentLog.open(path, config, filesystem=filesystem, clock=Clock()) as log:
            for n in range(9):
                values = [b"value %d " % i * (n + 1) for i in range(10)]
                times = [1_700_000_000_000 + half * 1000 + n * 50 - i % 3 * 20 for i in range(10)]
                durability = Durability.FLUSHED if n % 4 == 3 else Durability.BUFFERED
                report(log.append(values, timestamps_ms=times, durability=durability).last_offset + 1)
            log.flush()
            if half:
                report(-1 - 70)  # from now on only what is below is promised
                log.truncate_to(70, force=True)
                report(log.append([b"behind the cut"] * 3).last_offset + 1)


def die_at(path, config, nth):
    """(what a child had acknowledged when it died, whether it died)."""
    reading, writing = os.pipe()

    def work():
        os.close(reading)
        filesystem = Dying(REAL_FILESYSTEM, [nth])
        live(path, config, filesystem, lambda end: os.write(writing, end.to_bytes(8, "big", signed=True)))

    child = fork(work)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the child failed otherwise"
    promised = 0
    for at in range(0, len(data), 8):
        end = int.from_bytes(data[at : at + 8], "big", signed=True)
        promised = end if end >= 0 else min(promised, -1 - end)
    return promised, code != 0


def reopen_and_go_on(path, config, promised):
    with SegmentLog.open(path, config) as log:
        assert log.recovery.damaged_from is None, f"{path.parent.name}: {log.recovery}"
        assert log.log_end_offset >= promised, f"{path.parent.name}: {promised} were acknowledged: {log.recovery}"
        first = log.append([b"after", b"the crash"] * 40, timestamps_ms=1_800_000_000_000).base_offset
        found = [record.offset for record in log.records(0)]
        assert found == list(range(first + 80)), path.parent.name
        return first + 80


def assert_accepted(ends):
    for (path, end), dump in zip(ends.items(), dump_segments(*ends), strict=True):
        assert not dump.objections, path.parent.name
        assert not dump.has_holes, path.parent.name
        expected = 0
        for batch in dump.batches:
            assert batch["baseOffset"] == expected, path.parent.name
            expected = batch["lastOffset"] + 1
        assert expected == end, path.parent.name


@pytest.mark.parametrize("preallocate", [0, 2000])
def test_a_death_at_any_call_that_changes_the_disk(tmp_path, preallocate, torture, tool_or_skip):
    tool_or_skip(missing())
    config = LogConfig(**LAYOUT, preallocate_bytes=preallocate)
    step = torture.count(13, 1)
    nth = 1 + torture.random(preallocate).randrange(step)
    ends, lived = {}, False
    while not lived:
        path = tmp_path / f"{nth}" / "t-0"
        promised, died = die_at(path, config, nth)
        ends[path] = reopen_and_go_on(path, config, promised)
        lived, nth = not died, nth + step
    assert nth > 60, "there are that many calls in a life"
    assert_accepted(ends)


TEARS = {
    "thirty bytes short": lambda data, draw: data[:-30],
    "cut anywhere": lambda data, draw: data[: draw.randrange(1, len(data))],
    "a byte short": lambda data, draw: data[:-1],
    "noise behind": lambda data, draw: data + draw.randbytes(draw.randrange(1, 3000)),
    "zeros behind": lambda data, draw: data + bytes(5000),
    "zeros, then noise": lambda data, draw: data + bytes(500) + draw.randbytes(50),
    "a hole of zeros": lambda data, draw: zeroed(data, draw.randrange(len(data)), 200),
    "the last batch twice": lambda data, draw: data + data[-200:],
    "a flipped bit": lambda data, draw: flipped(data, draw.randrange(len(data) - 20, len(data))),
}


def zeroed(data, at, size):
    return (data[:at] + bytes(size) + data[at + size :])[: len(data)]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_torn_tails(tmp_path, codec, torture, tool_or_skip):
    """No flush was requested, so any torn bytes may be cut; Kafka's tool has to accept what is left."""
    tool_or_skip(missing())
    draw, ends = torture.random(codec), {}
    config = LogConfig(**LAYOUT, codec=codec)
    for round_ in range(torture.count(1, 20)):
        for name, tear in TEARS.items():
            path = tmp_path / f"{name} {round_}".replace(" ", "_").replace(",", "") / "t-0"
            die_at(path, config, 60 + 3 * round_)
            newest = max(path.glob("*.log"))
            if not newest.stat().st_size:
                newest = sorted(path.glob("*.log"))[-2]
            newest.write_bytes(tear(newest.read_bytes(), draw))
            # The machine stopped before a checkpoint was written; what its writer published died with it.
            for known in (*path.parent.glob("*-offset-checkpoint"), path.parent / PUBLISHED_NAME):
                known.unlink(missing_ok=True)
            tear_index(newest, draw)
            ends[path] = reopen_and_go_on(path, config, 0)
    assert_accepted(ends)


def tear_index(segment: Path, draw):
    """Indexes are written and torn independently of their segment."""
    for suffix in (".index", ".timeindex"):
        path = segment.with_suffix(suffix)
        what = draw.randrange(4)
        if what == 0:
            path.unlink(missing_ok=True)
        elif what == 1 and path.exists():
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])
        elif what == 2:
            path.write_bytes((path.read_bytes() if path.exists() else b"") + bytes(24))
