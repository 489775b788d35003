"""What `pushrep status` prints of a status, line by line."""

import pytest

from pushrep.status.table import count, duration, many, size, table, time_text
from pushrep.status.terminal import width, wrapped
from pushrep.status.text import lag_text, relayed_text, status_lines

T_MS = 1_700_000_000_000
AT = "2023-11-14 22:13:20Z"


def problem(**changed):
    one = {
        "problem": "replica_lags",
        "since_ms": None,
        "subject": "member 1",
        "why": "it is silent",
        "blocks": "nothing",
    }
    return one | {"advice": "Look at it.", "command": "pushrep status d"} | changed


OUTBOX = {
    "kind": "outbox", "place": "d", "directory": "d", "topic": "orders", "state": "leads", "why": "it was asked to",
    "outbox_id": "ob-1", "producer": "billing", "pid": 7, "acks": "all", "durability": "flushed", "in_sync_min": 2,
    "min_insync_replicas": 2, "member": 0, "epoch": 513, "is_changing": True, "partitions": 2,
    "log_end_offsets": 1234, "flushed_offsets": 1233, "high_watermarks": None,
    "hold": {"until_ms": T_MS, "reason": "a repair"}, "settings": {"retention_ms": None, "retention_bytes": 5},
    "relay": {"relayed": 1, "rows": {
        "waiting": 5, "oldest_ms": T_MS, "parked": 2, "sees_all": False,
        "snapshot": {"who": "a session", "since_ms": T_MS, "transactions": 3},
    }},
    "disk": {"mount": "/", "level": "tight", "used_bytes": 1536, "size_bytes": 3 << 40},
    "scrub": {"passes": 4, "passed_ms": None, "damaged": 3, "repaired": 2, "findings": [{}]},
    "certificates": {"replicas": 1_700_000_000, "console": None},
    "problems": [problem(blocks="appends", since_ms=T_MS), problem()],
    "members": [
        {"index": 0, "address": None, "is_joining": False, "is_leader": True, "lag": None, "trouble": None},
        {
            "index": 1, "address": "10.0.0.7:7400", "is_joining": False, "is_leader": False, "trouble": None,
            "lag": {"records": 10, "size_bytes": 2048, "age_ms": 1500, "in_sync": 1, "partitions": 2},
            "sessions": 2, "last_end_reason": "CLOSED",
        },
        {"index": 2, "address": "10.0.0.8:7400", "is_joining": True, "is_leader": False, "lag": None, "trouble": "no"},
    ],
    "destinations": [{
        "name": "kafka", "records": 1, "size_bytes": None, "age_ms": None, "trouble": "no answer",
        "stopped": [{"partition": 1, "offset": 9, "why": "too large"}],
    }],
    "parts": [{
        "partition": 0, "log_start_offset": 0, "log_end_offset": 1000, "flushed_offset": 999, "high_watermark": None,
        "leader_epoch": 513, "in_sync": [0, 1], "sessions": [
            {"replica": 1, "state": "STREAMING", "acknowledged": 900, "end_reason": None},
            {"replica": 2, "state": "CLOSED", "acknowledged": -1, "end_reason": "DIVERGED"},
        ],
    }],
}  # fmt: skip
OUTBOX_LINES = f"""\
d: outbox of topic orders, leads: it was asked to
ob-1, producer billing, pid 7, acks all, flushed
3 members, 2 in sync at least, min_insync_replicas 2; this is member 0, epoch 513, a change of members is not finished
takeovers are held until {AT}: a repair
2 partitions, 1,234 records appended, 1,233 on disk, ? replicated
changed by pushrep outbox set: retention_ms=none, retention_bytes=5
table: 1 row relayed, 5 wait, the oldest since {AT}; 2 are parked; \
a session keeps deleted rows from vacuum since {AT}, 3 transactions; \
other users' sessions are not seen without pg_read_all_stats
disk /: 1.5 KiB of 3.0 TiB used, tight
scrub: passes 4, none has ended; segments found damaged 3, repaired 2, damaged now 1
certificate for replicas: until {AT}
certificate for console: its expiry can't be read
! replica_lags, since {AT}: member 1: it is silent
  It blocks appends. Look at it.
  pushrep status d
! replica_lags: member 1: it is silent
  Look at it.
  pushrep status d

member  address        role     lag                         in sync  sessions  trouble, or last end
     0  here           leader
     1  10.0.0.7:7400  replica  10 records, 2.0 KiB, 1.5 s  1 of 2          2  CLOSED
     2  10.0.0.8:7400  joining                                                 no

destination       lag  trouble
kafka        1 record  no answer; partition 1 is stopped at 9: too large

partition  start    end  flushed  HWM  epoch  in sync  acknowledged by member
        0      0  1,000      999    ?    513      0 1  1: streaming 900; 2: closed ? (DIVERGED)"""

LEADER = {"outbox_id": "ob-1", "topic": "orders", "leader": 1, "epoch": 513, "is_here": False, "hold": None}
NODE = {
    "kind": "node", "place": "n", "directory": "n", "state": "runs", "address": "10.0.0.7:7400", "pid": 9,
    "leaders": [
        LEADER | {"address": "h:1", "silent_ms": 2500, "owner": "ann", "hold": OUTBOX["hold"]},
        LEADER | {"address": None, "silent_ms": None, "owner": None},
        LEADER | {"address": None, "silent_ms": None, "owner": None, "is_here": True},
    ],
    "standbys": [{"outbox_id": "ob-1", "state": "waits", "why": None}, {"outbox_id": "", "state": "new", "why": "no"}],
    "budget": {"held_bytes": 0, "held_bytes_max": 1024, "closed": {"idle": 1, "full": 2}, "connections_max": 64},
    "connections": 3,
    "replays": {"sessions_max": 8, "ended": {}, "sessions": [{
        "session_id": 255, "recording": 4, "state": "streaming", "position": 1000, "lag": 1, "credit": -1, "idle_ms": 0,
    }]},
    "outboxes": [
        {"scrub": {"passes": 1, "passed_ms": 1, "damaged": 1, "repaired": 0, "findings": [{}, {}]}},
        {"scrub": {"passes": 2, "passed_ms": 2, "damaged": 0, "repaired": 1, "findings": []}},
    ],
    "problems": [],
    "logs": [
        {"topic": "orders", "partition": 1, "log_start_offset": 0, "log_end_offset": 5, "high_watermark": 4,
         "leader_epoch": 2, "failure": wrong == "failure" and wrong, "finding": wrong == "finding" and wrong,
         "refused": wrong == "refused" and wrong, "outbox_id": "ob-1"}
        for wrong in ("failure", "finding", "refused", None)
    ],
}  # fmt: skip
NODE_LINES = f"""\
n: node, 10.0.0.7:7400, runs, pid 9
outbox ob-1 (orders of ann): member 1 (h:1) leads under epoch 513, last contact 2.5 s ago
  takeovers are held until {AT}: a repair
outbox ob-1 (orders): member 1 leads under epoch 513, it has resigned
outbox ob-1 (orders): this member leads; for the others' lag: pushrep status n/ob-1
standby of ob-1: waits
standby: new: no
connections: 3 of at most 64; 0 B of 1.0 KiB held; closed: idle 1, full 2
replays: 1 of at most 8 run; ended: none
scrub: passes 3, the last ended 20.0 d ago; segments found damaged 1, repaired 1, damaged now 2

log       start  end  HWM  epoch  what is wrong  outbox
orders-1      0    5    4      2  failure        ob-1
orders-1      0    5    4      2  finding        ob-1
orders-1      0    5    4      2  refused        ob-1
orders-1      0    5    4      2                 ob-1

session           recording  state      position       lag  credit   idle
00000000000000ff          4  streaming     1,000  1 record    -1 B  0.0 s"""


@pytest.mark.parametrize(("found", "lines"), [(OUTBOX, OUTBOX_LINES), (NODE, NODE_LINES)], ids=["outbox", "node"])
def test_every_line(found, lines, monkeypatch):
    monkeypatch.setattr("pushrep.status.text.time.time_ns", lambda: (20 * 86_400_000 + 1) * 1_000_000)
    assert "\n".join(status_lines(found, None)) == lines


def test_what_nobody_has_open_is_told_with_the_command_that_reads_it():
    found = {"kind": "logs", "place": "p", "directory": "a b", "state": "at rest", "problems": [], "logs": []}
    told = "nobody has it open, so nobody looks for damage: pushrep log verify 'a b'"
    assert list(status_lines(found, None)) == ["p: logs, at rest", told]
    assert told not in list(
        status_lines(found | {"logs": NODE["logs"][:1] and [NODE["logs"][0] | {"writer_pid": 3}]}, None)
    )
    assert list(status_lines(found | {"state": "logs", "address": "p"}, None)) == ["p: logs"]


def test_what_a_relay_does_not_know_is_left_out():
    rows = {"waiting": 0, "oldest_ms": None, "parked": 0, "snapshot": None, "sees_all": True}
    assert relayed_text(3, rows) == "3 rows relayed, 0 wait"
    assert relayed_text(3, None) == "3 rows relayed; the database does not say how many wait"
    assert lag_text(0, 5, 5) == "0 records"


def test_numbers_have_units():
    assert [size(n) for n in (-2048, 1023, 1024, (1 << 20) - 1, 5 << 30, 9000 << 40)] == [
        "-2.0 KiB", "1023 B", "1.0 KiB", "1024.0 KiB", "5.0 GiB", "9000.0 TiB",
    ]  # fmt: skip
    assert [duration(1000 * s) for s in (119, 120, 7_199, 7_200, 172_799, 172_800)] == [
        "119.0 s", "2.0 min", "120.0 min", "2.0 h", "48.0 h", "2.0 d",
    ]  # fmt: skip
    assert (time_text(T_MS), time_text(1 << 62)) == (AT, f"@{1 << 62}")
    assert (count(None), count(1000), many(1, "row"), many(1000, "row")) == ("?", "1,000", "1 row", "1,000 rows")


def test_columns_that_do_not_fit_fold_below_their_row(monkeypatch):
    rows = [("a", "12", "", "wo"), ("bb", "3", "", "")]
    columns = ("name", "n", "none", "text")
    assert list(table(columns, rows, 14)) == ["name   n  text", "a     12  wo", "bb     3"]
    assert list(table(columns, rows, 13)) == ["name   n", "a     12", "    text: wo", "bb     3"]
    assert list(table(columns, rows, 1))[:2] == ["name", "a"]
    assert list(table(columns, [], None)) == ["name  n  none  text"]
    assert wrapped("some words", 6, "  ") == ["  some", "  words"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "77")
    assert width() == 77
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert width() is None
