"""What a node's status tells of its logs, replays and disk: the problem, its subject, what it blocks, since when."""

import time
from dataclasses import replace

import pytest

from pushrep.log import SegmentLog
from pushrep.log.disk import DiskLevel
from pushrep.log.segment_log import logs_status
from pushrep.replay.events import ReplayState
from pushrep.replay.session import ReplayCounters, SessionCounters
from pushrep.replicate.node_status import STALLED_MS, BudgetStatus, NodeLog, NodeStatus

T_MS = 1_700_000_000_000
STATUS = "pushrep status at"
LOG = NodeLog("id", "orders", 3, 0, 7, 7, 7, 1)
DAMAGED = LOG._replace(damaged_from=5, since_ms=T_MS)
FAILED = LOG._replace(failure="no disk", since_ms=T_MS)
WAITS = LOG._replace(finding="it is longer", since_ms=T_MS)
SESSION = SessionCounters(26, 7, ReplayState.REPLAY, 0, 0, 0, 12, 0, 0, STALLED_MS + 1)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The status of a node that has nothing wrong."""
    with SegmentLog.open(tmp_path_factory.mktemp("node") / "orders-3") as log:
        logs = logs_status("id", [log])
    return NodeStatus(
        pid=1,
        replica_epoch=1,
        connections=0,
        budget=BudgetStatus(1, 0, 1, {}),
        logs=(LOG,),
        outboxes=(logs,),
        replays=ReplayCounters((SESSION._replace(stalled_ms=STALLED_MS),), 1, 0, 0, {}, {}),
        refusals=(),
        unauthorised=(),
        standbys=(),
        leaders=(),
    )


@pytest.mark.parametrize(
    ("log", "problem", "why", "blocks"),
    [
        (FAILED, "log_offline", "no disk", "replication"),
        (LOG._replace(refused="it is full", since_ms=T_MS), "log_offline", "it is full", "replication"),
        (WAITS, "log_waits", "it is longer", "replication"),
        (DAMAGED, "damaged", "it lost records that were on disk, from offset 5 on", "replication"),
    ],
)
def test_a_log_in_trouble_is_told_with_its_name(sound, log, problem, why, blocks):
    (told,) = replace(sound, logs=(LOG, log)).as_dict()["problems"]
    assert (told["problem"], told["subject"], told["why"]) == (problem, "log id/orders-3", why)
    assert (told["blocks"], told["since_ms"]) == (blocks, T_MS)
    assert told["command"].endswith("/id orders-3")


def test_each_trouble_of_one_log_is_told(sound):
    status = replace(sound, logs=(LOG._replace(failure="a", finding="b", damaged_from=5),))
    assert {one.name for one in status.problems()} == {"log_offline", "log_waits", "damaged"}


def test_a_replay_that_takes_nothing_is_told_after_a_minute(sound):
    assert sound.problems() == [], "a minute is not over"
    before_ms = time.time_ns() // 1_000_000
    replays = sound.replays._replace(sessions=(SESSION,))
    (told,) = replace(sound, replays=replays).as_dict()["problems"]
    assert (told["problem"], told["subject"]) == ("replay_stalled", "replay 000000000000001a of 7")
    assert told["why"] == "it is 12 records behind, and takes nothing for 60 s"
    assert before_ms <= told["since_ms"] + STALLED_MS + 1 <= time.time_ns() // 1_000_000
    assert "000000000000001a" in told["command"]


def test_a_full_disk_of_a_node_blocks_replication(sound):
    (logs,) = sound.outboxes
    (told,) = replace(sound, outboxes=(logs._replace(disk=logs.disk._replace(level=DiskLevel.FULL)),)).problems()
    assert (told.name, told.blocked.value, told.argument) == ("disk_full", "replication", "/id")


def test_logs_offline_are_those_that_failed_or_wait_each_once(sound):
    both = FAILED._replace(finding="it is longer")
    assert replace(sound, logs=(LOG, DAMAGED, FAILED, WAITS, both)).logs_offline == 3


def test_every_state_of_a_replay_but_done_is_counted(sound):
    listed = [SESSION._replace(state=one) for one in (ReplayState.REPLAY, ReplayState.REPLAY, ReplayState.DONE)]
    states = replace(sound, replays=sound.replays._replace(sessions=tuple(listed))).replay_states
    assert states == {one.name.lower(): 0 for one in ReplayState if one is not ReplayState.DONE} | {"replay": 2}
