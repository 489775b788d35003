"""What an outbox's status tells of its facts: the problem, its subject, what it blocks, since when, and a command."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pushrep import Outbox
from pushrep.election.errors import NotLeader
from pushrep.election.grants import Member
from pushrep.election.messages import PushSessionEndReason
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, write_progress
from pushrep.log.disk import DiskLevel
from pushrep.outbox import OutboxConfig, RecordRefused
from pushrep.outbox.partition_appender import StoppedLog
from pushrep.outbox.partition_replicas import ReplicaLag
from pushrep.outbox.status import (
    KAFKA_AWAY_MS,
    PAUSE_MS,
    SLOT_WAITS_MS,
    VACUUM_HELD_TRANSACTIONS,
    DestinationStatus,
    LateRecords,
    LeadingState,
    MemberStatus,
    OldestSnapshot,
    PartitionStatus,
    RelayStatus,
    StoppedPartition,
    TableRows,
    WorkersStatus,
    closed_status,
    leading_state,
    status_of,
)
from pushrep.status import Leads

T_MS = 1_700_000_000_000
STATUS = "pushrep status at"
PARTITIONS = "pushrep status at --partitions"


def told(status):
    """Of each problem its name, subject, what it blocks, since when, and the command at the place `at`."""
    shown = [one.as_dict("at") for one in status.find_problems()]
    return [(one["problem"], one["subject"], one["blocks"], one["since_ms"], one["command"]) for one in shown]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The status of an outbox of three partitions that has nothing wrong."""
    with Outbox.open(tmp_path_factory.mktemp("outbox"), "orders", 3, "billing") as outbox:
        return outbox.status()


NOT_LEADING = [("not_leading", "outbox orders", "appends", T_MS, PARTITIONS)]
UNDER = [("under_min_insync", "2 of 3 partitions", "appends", T_MS, PARTITIONS)]
LATE = (LateRecords(0, T_MS + 9, "the disk"), LateRecords(2, T_MS, "in-sync members"))
LATE_TOLD = [("not_acknowledged", "2 of 3 partitions", "acknowledgements", T_MS, PARTITIONS)]
PARKING_STOPPED = ("log_stopped", "parking log", "shipping", T_MS + 5, PARTITIONS)
AWAY = MemberStatus(index=2, address="b:1", is_leader=False, trouble="no answer", trouble_since_ms=T_MS)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"state": LeadingState.RESIGNED}, NOT_LEADING),
        ({"state": LeadingState.FAILED}, NOT_LEADING),
        ({"state": LeadingState.LOOKING, "acks": "ALL"}, NOT_LEADING),
        ({"state": LeadingState.LOOKING, "acks": "LOCAL"}, []),
        ({"under_min_insync": 2, "acks": "ALL"}, UNDER),
        ({"under_min_insync": 2, "acks": "LOCAL"}, []),
        ({"under_min_insync": 2, "acks": "LOCAL", "late": LATE}, LATE_TOLD),
        ({"under_min_insync": 2, "acks": "ALL", "late": LATE}, UNDER),
        ({"under_min_insync": 2, "acks": "ALL", "late": LATE, "state": LeadingState.FAILED}, NOT_LEADING),
        (
            {"late": (LateRecords(1, T_MS, "the disk"), LateRecords(3, T_MS + 1, "the disk"))},
            [
                ("not_acknowledged", "partition 1", "acknowledgements", T_MS, PARTITIONS),
                ("not_acknowledged", "parking log", "shipping", T_MS + 1, PARTITIONS),
            ],
        ),
        (
            {"damaged": (2, 3), "damaged_since_ms": (T_MS, T_MS + 1)},
            [
                ("damaged", "partition 2", "appends", T_MS, "pushrep log verify at orders-2"),
                ("damaged", "parking log", "shipping", T_MS + 1, "pushrep log verify at orders.parked-3"),
            ],
        ),
        (
            {
                "stopped": (
                    StoppedLog(0, T_MS + 7, T_MS + 8, "gone"),
                    StoppedLog(1, T_MS, T_MS + 8, "gone"),
                    StoppedLog(2, T_MS + 3, T_MS + 8, "full"),
                    StoppedLog(3, T_MS + 5, T_MS + 8, "gone"),
                )
            },
            [
                ("log_stopped", "2 of 3 partitions", "appends", T_MS, PARTITIONS),
                PARKING_STOPPED,
                ("log_stopped", "partition 2", "appends", T_MS + 3, PARTITIONS),
            ],
        ),
        ({"members": (AWAY,)}, [("replica_away", "member 2 at b:1", "replication", T_MS, STATUS)]),
        (
            {"members": (replace(AWAY, is_left=True),)},
            [("replica_away", "member 2 at b:1", "nothing", T_MS, "pushrep replica remove at 2")],
        ),
        ({"members": (replace(AWAY, trouble=None),)}, []),
    ],
)  # fmt: skip
def test_each_fact_of_an_open_outbox_is_one_problem_and_the_worse_one_hides_what_follows_from_it(
    sound, changed, expected
):
    assert told(replace(sound, refused_ms=T_MS, in_sync_min=1, **changed)) == expected


def test_a_full_disk_is_told_in_the_place_of_the_logs_that_it_stopped(sound):
    full = replace(sound, stopped=(StoppedLog(0, 1, 2, "no space"),), disk=sound.disk._replace(level=DiskLevel.FULL))
    assert [name for name, *_ in told(full)] == ["disk_full"]


def test_a_state_says_its_reason_and_how_many_members_are_missing(sound):
    (lost,) = replace(sound, state=LeadingState.RESIGNED, why="member 2 leads").find_problems()
    assert lost.why == "resigned: member 2 leads"
    (lost,) = replace(sound, state=LeadingState.FAILED, why=None).find_problems()
    assert lost.why == "failed"
    few = replace(sound, acks="ALL", under_min_insync=1, min_insync_replicas=2, in_sync_min=1)
    assert [one.why for one in few.find_problems()] == ["2 in-sync members are needed, 1 are there"]
    assert [one.why for one in replace(sound, late=LATE).find_problems()] == ["records wait for in-sync members"]


@pytest.mark.parametrize("state", LeadingState)
def test_who_asks_for_the_leader_is_sent_to_another_member_only_where_that_one_leads(sound, state):
    members = tuple(MemberStatus(index=n, address=f"m{n}:1", is_leader=n == 1) for n in range(3))
    status = replace(sound, state=state, members=members, leader=1)
    is_here = state in {LeadingState.ALONE, LeadingState.LEADING}
    assert status.leads == Leads(is_here, 1, "" if is_here else "m1:1")
    assert replace(status, leader=7).leads.address == ""
    assert [name for name, is_so in status.state_flags.items() if is_so] == [state.name.lower()]


def test_what_a_member_is_told_of_and_how_far_a_topic_is_behind():
    leader = MemberStatus(index=0, address="", is_leader=True, sessions=3)
    lag = ReplicaLag(records=1, size_bytes=1, age_ms=1, in_sync=1, partitions=1)
    assert (leader.replica, leader.pushed_to) == (0, None)
    assert replace(leader, index=4, lag=lag).pushed_to == 3
    part = PartitionStatus(
        partition=0, log_start_offset=0, log_end_offset=9, flushed_offset=9, high_watermark=9, leader_epoch=0,
        shipped={"kafka:a": 4, "kafka:ahead": 11},
    )  # fmt: skip
    assert part.unshipped == {"kafka:a": 5, "kafka:ahead": 0}


# -- the facts of an open outbox ---------------------------------------------------------------------------------------


def of_partition(led=None, failure=None):
    return SimpleNamespace(led=led, failure=failure)


def leads(resigned=None, **sessions):
    """A partition that is led, with these sessions by member."""
    leader = SimpleNamespace(in_sync={0, 2}, may_append_all=True, held_by=lambda _: 0)
    leader.sessions = {int(index[1:]): one for index, one in sessions.items()}
    return SimpleNamespace(resigned=resigned, lock=threading.Lock(), leader=leader)


RESIGNED = NotLeader(1, 300, "member 1 leads")


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        (None, (LeadingState.ALONE, None)),
        ([of_partition(leads()), of_partition(leads())], (LeadingState.LEADING, None)),
        ([of_partition(leads()), of_partition()], (LeadingState.LOOKING, None)),
        ([of_partition(leads()), of_partition(leads(RESIGNED))], (LeadingState.RESIGNED, "member 1 leads")),
        ([of_partition(leads(), RESIGNED), of_partition()], (LeadingState.RESIGNED, "member 1 leads")),
        ([of_partition(failure=OSError("the disk")), of_partition(leads())], (LeadingState.FAILED, "the disk")),
    ],
)
def test_the_first_partition_that_is_not_led_says_the_state_of_an_outbox_and_why(partitions, expected):
    appenders = None if partitions is None else dict(enumerate(partitions))
    replication = None if appenders is None else SimpleNamespace(appenders=appenders)
    assert leading_state(SimpleNamespace(replication=replication)) == expected


class Waits:
    """An appender whose oldest batch has waited since then."""

    def __init__(self, appender, since_s):
        self.appender, self.since_s = appender, since_s

    def __getattr__(self, name):
        return getattr(self.appender, name)

    def waits_since_s(self):
        return None if self.since_s is None else (self.since_s, "the disk")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Of an open outbox of three partitions, whose linger time is 7 ms."""
    place, config = tmp_path_factory.mktemp("outbox"), OutboxConfig(linger_ms=7)
    with Outbox.open(place, "orders", 3, "billing", config=config) as outbox:
        yield outbox.facts


def test_a_batch_is_late_once_it_has_waited_for_longer_than_a_pause_and_its_linger_time(facts, monkeypatch):
    limit_ms = PAUSE_MS + 7
    monkeypatch.setattr("pushrep.outbox.status.perf_counter", lambda: 1_000.0)
    ages_ms = (None, limit_ms - 1, limit_ms)
    sinces_s = [None if age_ms is None else 1_000 - (age_ms + 0.5) / 1_000 for age_ms in ages_ms]
    waiting = [Waits(*given) for given in zip(facts.appenders, sinces_s, strict=True)]
    before_ms = time.time_ns() // 1_000_000
    (late,) = status_of(facts._replace(appenders=waiting)).late
    assert (late.partition, late.waits_for) == (2, "the disk")
    assert before_ms <= late.since_ms + limit_ms <= time.time_ns() // 1_000_000


def test_each_member_is_told_with_what_is_known_of_it(facts):
    gone = SimpleNamespace(is_live=False, reason=PushSessionEndReason.LOG_DIVERGED)
    live = SimpleNamespace(is_live=True, reason=None)
    led = {0: leads(r1=gone, r2=live), 1: leads(r1=live, r2=live), 2: leads(r2=gone)}
    lags = {1: ReplicaLag(records=5), 2: ReplicaLag()}
    replication = SimpleNamespace(
        grant=None, kept_grant=None, needs_all=False, leading=None, learners={3: "d:1", 4: "e:1"},
        left_learners={4: T_MS}, is_silent=lambda index: index in {0, 1, 4}, lag_by_index=lambda: lags,
        members=(Member(0, "a:1"), Member(1, "b:1"), Member(2, "c:1")),
        appenders={number: of_partition(one) for number, one in led.items()},
    )  # fmt: skip
    for one in replication.appenders.values():
        one.refused_ms, one.acknowledges = lambda *_: None, lambda *_: True
    with_members = facts._replace(replication=replication)

    def shown():
        return {one.index: one for one in status_of(with_members, ()).members}

    found = shown()
    assert [one.address for one in found.values()] == ["a:1", "b:1", "c:1", "d:1", "e:1"]
    assert [one.is_leader for one in found.values()] == [True, False, False, False, False]
    assert [one.is_joining for one in found.values()] == [False, False, False, True, True]
    assert [one.is_left for one in found.values()] == [False, False, False, False, True]
    assert [one.is_silent for one in found.values()] == [False, True, False, False, True], "the leader answers itself"
    assert [one.sessions for one in found.values()] == [0, 1, 2, 0, 0]
    assert [one.last_end_reason for one in found.values()] == [None, "LOG_DIVERGED", "LOG_DIVERGED", None, None]
    assert [one.lag for one in found.values()] == [None, lags[1], lags[2], None, None]
    assert [one.trouble is None for one in found.values()] == [True, True, True, True, False]
    assert [one.trouble_since_ms for one in found.values()] == [None, None, None, None, T_MS]
    replication.leading = SimpleNamespace(
        troubles=lambda: {1: "b:1: it refuses", 4: "e:1: no answer"}, troubled_since_ms={1: T_MS + 1, 4: T_MS + 2},
        manager=SimpleNamespace(
            requests={}, memory=SimpleNamespace(used_bytes=0, limit_bytes=0, evicted_bytes=0), session_ends={},
            connections_lost={}, not_caught_up={}, refusals={},
        ),
    )  # fmt: skip
    found = shown()
    assert (found[1].trouble, found[1].trouble_since_ms) == ("it refuses", T_MS + 1)
    assert (found[2].trouble, found[2].trouble_since_ms) == (None, None)
    assert found[4].trouble_since_ms == T_MS, "nobody goes on with it, whatever else it has"


# -- destinations ------------------------------------------------------------------------------------------------------

TOPIC = DestinationStatus(name="kafka:orders", topic="orders", records=7)
STOPPED = StoppedPartition(1, 9, "too large", T_MS)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"trouble": "no broker", "trouble_ms": KAFKA_AWAY_MS - 1}, []),
        ({"fence_waits": ("a transaction", T_MS)}, [("fence_waits", "topic orders", "shipping", T_MS, STATUS)]),
        (
            {"fence_waits": ("a transaction", T_MS), "trouble": "no broker", "trouble_ms": KAFKA_AWAY_MS},
            [("fence_waits", "topic orders", "shipping", T_MS, STATUS)],
        ),
        (
            {"stopped": (STOPPED,)},
            [("shipping_stopped", "partition 1 to topic orders", "shipping", T_MS, PARTITIONS)],
        ),
        (
            {"stopped": (STOPPED._replace(is_refused=True),)},
            [(
                "shipping_stopped", "partition 1 to topic orders", "shipping", T_MS,
                "pushrep outbox skip 9 --partition 1 --topic orders --directory at --reason WHY",
            )],
        ),
        (
            {"parked": 2, "parked_since_ms": T_MS},
            [("records_parked", "topic orders", "nothing", T_MS, "pushrep outbox parked list --directory at")],
        ),
    ],
)  # fmt: skip
def test_what_keeps_records_from_a_topic(sound, changed, expected):
    topic = replace(TOPIC, **changed)
    assert told(topic) == told(replace(sound, destinations=(topic,))) == expected
    assert topic.in_trouble == ("trouble" in changed)


def test_a_topic_that_takes_nothing_is_a_problem_from_the_fifth_second_on():
    before_ms = time.time_ns() // 1_000_000
    (away,) = replace(TOPIC, trouble="no broker", trouble_ms=KAFKA_AWAY_MS).find_problems()
    assert (away.name, away.why) == ("kafka_away", "7 records are not shipped: no broker")
    assert before_ms <= away.since_ms + KAFKA_AWAY_MS <= time.time_ns() // 1_000_000


# -- the relay of a database's rows ------------------------------------------------------------------------------------


def relay(trouble=None, for_ms=0, *, is_stopped=False, rows=None):
    since_ms = None if trouble is None else time.time_ns() // 1_000_000 - for_ms
    return RelayStatus("orders", 3, rows, trouble, since_ms, is_stopped)


def test_a_relay_that_waits_is_a_problem_after_some_seconds_and_one_that_stopped_at_once(sound):
    where, command = "the table of topic orders", "pushrep tables status DSN --topic orders"
    assert told(relay()) == told(relay("busy", PAUSE_MS - 1_000)) == []
    for one, name in ((relay("busy", PAUSE_MS), "table_waits"), (relay("lost", 0, is_stopped=True), "table_stopped")):
        expected = [(name, where, "shipping", one.trouble_since_ms, command)]
        assert told(one) == told(replace(sound, relay=one)) == expected
    assert told(relay("busy", PAUSE_MS, rows=TableRows(1, None, 2, None, sees_all=True)))[1:] == [
        ("rows_parked", where, "nothing", None, command)
    ]


def test_a_snapshot_is_named_with_how_much_it_keeps_and_ages_never_go_below_zero():
    old = OldestSnapshot("process 7", VACUUM_HELD_TRANSACTIONS, None)
    (held,) = relay(rows=TableRows(0, None, 0, old, sees_all=False)).find_problems()
    assert held.why == "process 7 has kept deleted rows from vacuum for 10,000,000 transactions"
    assert (old.age_ms, TableRows(0, None, 0, None, sees_all=True).age_ms) == (None, 0)
    ahead_ms = time.time_ns() // 1_000_000 + 60_000  # another machine's clock
    assert (old._replace(since_ms=ahead_ms).age_ms, TableRows(1, ahead_ms, 0, None, sees_all=True).age_ms) == (0, 0)
    assert TableRows(1, ahead_ms - 120_000, 0, None, sees_all=True).age_ms >= 60_000


# -- closed outboxes and slots -----------------------------------------------------------------------------------------


def test_a_closed_outbox_is_told_by_its_files(tmp_path):
    with Outbox.open(tmp_path, "orders", 2, "billing") as outbox:
        outbox.append_many(1, [b"a", b"b", b"c"]).result(60)
        outbox.append(0, b"d").result(60)
        identity = outbox.identity
    progress = ShippingProgress(partitions={1: PartitionProgress(2, 2, 7)})
    write_progress(REAL_FILESYSTEM, tmp_path, {"orders": progress, "other": ShippingProgress()})
    status = closed_status(tmp_path, "nobody has it open")
    assert (status.pid, status.state, status.why) == (None, "closed", "nobody has it open")
    assert (status.outbox_id, status.producer, status.partitions) == (identity.outbox_id, "billing", 2)
    assert (status.log_end_offsets, status.flushed_offsets, status.epoch, status.member) == (4, 4, 0, 0)
    assert [(one.partition, one.log_start_offset, one.log_end_offset, one.flushed_offset) for one in status.parts] == [
        (0, 0, 1, 1), (1, 0, 3, 3)
    ]  # fmt: skip
    assert [(one.name, one.topic, one.records) for one in status.destinations] == [
        ("kafka:orders", "orders", 2), ("kafka:other", "other", 4)
    ]  # fmt: skip
    assert [(one.index, one.address, one.is_leader) for one in status.members] == [(0, "", True)]
    newest = max(one.stat().st_mtime_ns for one in tmp_path.rglob("*") if one.is_file())
    assert status.written_ms == newest // 1_000_000
    assert told(status) == [], "it is no slot"
    assert [name for name, *_ in told(replace(status, pid=7))] == ["not_answering"]
    parked = replace(TOPIC, parked=1)
    assert [name for name, *_ in told(replace(status, destinations=(parked,)))] == ["records_parked"]


def test_a_sound_outbox_takes_requests_and_counts_what_it_took(tmp_path):
    with Outbox.open(tmp_path, "orders", 2, "billing") as outbox:
        outbox.append_many(1, [b"a", b"b"]).result(60)
        with pytest.raises(RecordRefused):
            outbox.append(2, b"a")
        status = outbox.status()
    assert status.is_ready
    appends = status.appends
    assert (appends.records, appends.batches, appends.failed, appends.buffer_bytes) == (2, 1, {}, 0)
    assert appends.size_bytes > 0
    assert appends.refused == {"RecordRefused": 1}
    assert appends.buffer_limit_bytes == OutboxConfig().buffer_bytes
    assert [(one.partition, one.log_end_offset, one.damaged_from, one.shipped) for one in status.parts] == [
        (0, 0, None, {}), (1, 2, None, {})
    ]  # fmt: skip
    assert (status.leader, status.epoch, status.in_sync_min, status.refused_ms, status.push) == (0, -1, 1, None, None)


@pytest.fixture
def slot(tmp_path):
    """A closed slot of which a topic lacks records, written long ago."""
    with Outbox.open_slot(tmp_path, "orders", 1, "billing", 2) as outbox:
        outbox.append(0, b"a").result(60)
    write_progress(REAL_FILESYSTEM, tmp_path / "slot-0", {"orders": ShippingProgress()})
    return replace(closed_status(tmp_path / "slot-0", ""), written_ms=T_MS)


def test_a_slot_waits_once_nobody_has_had_it_open_for_some_seconds(slot):
    assert told(slot) == [("slot_waits", "slot-0", "shipping", T_MS, "pushrep ship at --bootstrap-servers HOST:9092")]
    lately_ms = time.time_ns() // 1_000_000 - SLOT_WAITS_MS
    assert told(replace(slot, written_ms=lately_ms + 5_000)) == []
    assert [name for name, *_ in told(replace(slot, written_ms=lately_ms - 1))] == ["slot_waits"]
    assert [name for name, *_ in told(replace(slot, pid=7))] == ["not_answering"]
    assert told(replace(slot, destinations=(replace(TOPIC, records=0),))) == []


def test_a_slot_whose_worker_died_before_it_reached_a_broker_lacks_what_the_others_ship(slot, tmp_path):
    with (
        Outbox.open_slot(tmp_path, "orders", 1, "billing", 2),
        Outbox.open_slot(tmp_path, "orders", 1, "billing", 2) as outbox,
    ):
        outbox.append_many(0, [b"b", b"c"]).result(60)
    (topic,) = closed_status(tmp_path / "slot-1", "").destinations
    assert (topic.topic, topic.records) == ("orders", 2)
    assert slot.destinations[0].records == 1


def test_a_worker_answers_for_the_slots_beside_its_own(sound, slot):
    here, there = Path(sound.directory), Path(slot.directory)
    own = replace(sound, state=LeadingState.FAILED, refused_ms=T_MS)
    closed = {"problems": [slot_waits.as_dict("{odd}") for slot_waits in slot.find_problems()], "topic": "orders"}
    taking = {"problems": [], "takes_appends": True}
    status = WorkersStatus(directory=str(here.parent), worker=own, others={there: closed})
    assert [(one.name, one.subject, one.since_ms) for one in status.find_problems()] == [
        ("not_leading", f"{here.name}, outbox orders", T_MS), ("slot_waits", "slot-0", T_MS)
    ]  # fmt: skip
    assert [one.as_dict("elsewhere")["command"] for one in status.find_problems()] == [
        f"pushrep status {here} --partitions", "pushrep ship {odd} --bootstrap-servers HOST:9092"
    ]  # fmt: skip
    (sample,) = status.elsewhere()
    assert (sample.labels["problem"], sample.labels["topic"], sample.value) == ("slot_waits", "orders", 1)
    assert status.is_ready == own.takes_appends
    unready = replace(own, takes_appends=False)
    assert not replace(status, worker=unready).is_ready
    assert replace(status, worker=unready, others={there: taking}).is_ready, "another one takes requests"
    assert (status.leads, status.own) == (own.leads, own)
