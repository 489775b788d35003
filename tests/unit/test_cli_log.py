"""`pushrep log ...` as a user types it: its output, its JSON, and its exit codes."""

import json
import os
import re
import shutil

import pytest

from pushrep.cli import main as cli_main
from pushrep.log import LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.records import header as layout
from tests.support.control_batches import as_control

CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=100)
MIDDLE = "00000000000000000009.log"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "out" / "orders-0"
    with SegmentLog.open(path, CONFIG) as opened:
        for number in range(7):
            opened.append([b"value %d" % number] * 3, keys=[b"\xff"] * 3, timestamps_ms=1_700_000_000_000 + number)
    shutil.copytree(path, tmp_path / "copy" / "orders-0")
    return path


@pytest.fixture
def run(capsys):
    """Run `pushrep log ...`; (exit code, standard output, standard error)."""

    def command(*arguments):
        code = cli_main.run(["log", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def damage(log):
    data = bytearray((log / MIDDLE).read_bytes())
    data[70] ^= 1
    (log / MIDDLE).write_bytes(data)


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_ls_shows_every_log(run, log):
    with SegmentLog.open(log.parent / "orders-1", CONFIG) as other:
        other.append(b"x")
        code, out, _ = run("ls", log.parent, "--json")
        assert code == 0
        first, second = json_lines(out)
        assert (first["name"], first["log_end_offset"], first["segments"]) == ("orders-0", 21, 3)
        assert (second["log_end_offset"], second["writer_pid"], second["known_by"]) == (1, os.getpid(), "writer")
        assert not second["is_clean"]
        code, out, _ = run("ls", log.parent)
        assert code == 0
        assert f"pid {os.getpid()}" in out
    _, out, _ = run("ls", log.parent, "--json")
    assert all(one["is_clean"] and one["known_by"] == "clean marker" for one in json_lines(out))


def test_describe_shows_what_is_there_and_what_lies_aside(run, log):
    (log / f"{MIDDLE}.10.cut").write_bytes(b"kept")
    (log / "outbox-positions").write_bytes(b"an outbox's own")
    code, out, _ = run("describe", log.parent, log.name, "--json")
    assert code == 0
    facts = json.loads(out)
    assert [segment["base_offset"] for segment in facts["segments"]] == [0, 9, 18]
    assert facts["leader_epochs"] == [[0, 0]]
    assert facts["checkpoints"] == {"recovery_point": 21, "log_start_offset": 0, "high_watermark": 21}
    assert facts["clean_marker"]["end_offset"] == 21
    assert facts["leftovers"] == [{"name": f"{MIDDLE}.10.cut", "size_bytes": 4}]
    code, out, _ = run("describe", log.parent, log.name)
    assert code == 0
    assert (
        out
        == f"""\
log                  orders-0
log id               {facts["log_id"]}
log start offset     0
log end offset       21
flushed offset       21
high watermark       21
known by             clean marker
writer               none
clean marker         end_offset 21, last_segment_bytes {facts["segments"][2]["size_bytes"]}, leader_epoch 0
checkpoints
- recovery point     21
- log start offset   0
- high watermark     21
leader epochs        0 from 0
             segment   size  index entries  time index entries
00000000000000000000  318 B              2                   2
00000000000000000009  318 B              2                   2
00000000000000000018  106 B              0                   1
aside
file                             size
00000000000000000009.log.10.cut   4 B
"""
    )


def test_describe_says_what_is_not_known_and_who_writes(run, log):
    copy = log.parents[1] / "copy" / log.name
    (copy / "leader-epoch-checkpoint").unlink()
    _, out, _ = run("describe", copy.parent, copy.name)
    for line in (
        "clean marker         not listed",
        "- recovery point     no checkpoint",
        "leader epochs        none kept",
    ):
        assert line in out.splitlines()
    with SegmentLog.open(log, CONFIG):
        _, out, _ = run("describe", log.parent, log.name)
        assert f"writer               pid {os.getpid()}" in out.splitlines()


def test_dump_window_records_and_indexes(run, log):
    code, out, _ = run("dump", log.parent, log.name, "--from", "4", "--to", "10", "--records", "--json")
    assert code == 0
    batches = [entry for entry in json_lines(out) if "baseOffset" in entry]
    assert [batch["baseOffset"] for batch in batches] == [3, 6, 9]
    record = batches[0]["records"][0]
    assert (record["value"], record["key_base64"]) == ("value 1", "/w==")
    code, out, _ = run("dump", log.parent, log.name, "--indexes")
    assert code == 0
    assert "offset: 5 position: 106" in out
    assert "timestamp: 1700000000001 offset: 5" in out


def test_dump_of_keys_values_and_headers(run, tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as opened:
        headers = [("h", b"w"), ("n", None), ("b", b"\xff")]
        opened.append([b"v", b"\xff"], keys=[None, b"k"], headers=[headers, []], timestamps_ms=1)
    code, out, _ = run("dump", tmp_path, "orders-0", "--records", "--json")
    batch, end = json_lines(out)
    assert (code, end["next_offset"], end["rest_bytes"], end["isvalid"], end["reason"]) == (0, 2, 0, True, None)
    assert (batch["lastOffset"], batch["count"], batch["size"], batch["isvalid"]) == (1, 2, end["end_position"], True)
    assert batch["records"] == [
        {"offset": 0, "timestamp": 1, "key": None, "value": "v", "headers": [
            {"name": "h", "value": "w"}, {"name": "n", "value": None}, {"name": "b", "value_base64": "/w=="},
        ]},
        {"offset": 1, "timestamp": 1, "key": "k", "value_base64": "/w==", "headers": []},
    ]  # fmt: skip
    _, out, _ = run("dump", tmp_path, "orders-0", "--records")
    assert "| offset: 0 CreateTime: 1 keySize: -1 valueSize: 1 sequence: -1 headerKeys: [h,n,b] payload: v" in out


def test_dump_of_entries_as_json(run, log):
    code, out, _ = run("dump", log / "00000000000000000000.index", "--json")
    assert (code, [{name: one[name] for name in ("offset", "position")} for one in json_lines(out)]) == (
        0, [{"offset": 5, "position": 106}, {"offset": 8, "position": 212}],
    )  # fmt: skip
    code, out, _ = run("dump", log / "00000000000000000000.timeindex", "--json")
    entries = [(one["timestamp"] - 1_700_000_000_000, one["offset"]) for one in json_lines(out)]
    assert (code, entries) == (0, [(1, 5), (2, 8)])
    code, out, _ = run("dump", log / "leader-epoch-checkpoint", "--json")
    assert (code, [one["line"] for one in json_lines(out)]) == (0, ["epoch: 0 startOffset: 0"])
    code, out, _ = run("dump", log / "00000000000000000018.index")
    assert (code, out.splitlines()[1:]) == (0, [f"{log / '00000000000000000018.index'} is empty."])


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        (b"\0\0\0\1", b"\0\0\0\0\0\7", "endTxnMarker: COMMIT coordinatorEpoch: 7"),
        (b"\0\0\0\0", b"\0\0\0\0\0\x08", "endTxnMarker: ABORT coordinatorEpoch: 8"),
        (b"\0\0\0\0", b"short", "controlType: ABORT"),
        (b"\0\0\0\2", b"", "controlType: 2"),
        (None, None, "controlType: UNKNOWN"),
    ],
)
def test_dump_of_a_marker(run, tmp_path, key, value, shown):
    file = tmp_path / "00000000000000000000.log"
    batch = encode_batch([value], keys=[key], timestamps_ms=1)
    layout.stamp(data := bytearray(batch.data), 0, 0)
    file.write_bytes(as_control(bytes(data)))
    code, out, _ = run("dump", file, "--records")
    assert (code, out.splitlines()[-1].partition(" headerKeys: [] ")[2]) == (0, shown)
    assert " isControl: true " in out


def test_dump_of_a_file_of_which_nothing_is_asked(run, log):
    code, _, err = run("dump", log.parent, log.name, "--from", 21)
    assert (code, err) == (0, "nothing at or above --from 21\n")
    code, _, err = run("dump", log.parent, log.name, "--from", 21, "--to", 30)
    assert (code, err) == (0, "nothing at or above --from 21 and below --to 30\n")


def test_dump_of_the_small_files(run, log):
    for name, text in (
        ("leader-epoch-checkpoint", "epoch: 0 startOffset: 0"),
        ("partition.metadata", "topic_id: "),
        ("../recovery-point-offset-checkpoint", "orders-0: 21"),
        ("../.pushrep_cleanshutdown", "endOffset: 21"),
    ):
        code, out, _ = run("dump", log / name)
        assert code == 0
        assert text in out
    code, out, _ = run("dump", log / ".." / ".lock")
    assert code == 1
    (log / "partition.metadata").write_bytes(b"nonsense")
    code, out, _ = run("dump", log / "partition.metadata")
    assert code == 1
    assert "isvalid: false" in out


def test_dump_stops_at_damage_with_exit_code_1(run, log):
    damage(log)
    code, out, _ = run("dump", log.parent, log.name)
    assert code == 1
    assert "isvalid: false" in out
    assert "expectedOffset: 9" in out
    assert "baseOffset: 18" in out, "the next segment has a beginning of its own"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (MIDDLE, "it ends at offset 9, the next file begins at 18"),
        (f"{0:020d}.log", "the log starts at offset 0, its first file is missing"),
    ],
)
def test_dump_names_a_file_that_is_missing_with_exit_code_1(run, log, name, says):
    (log / name).unlink()
    code, out, _ = run("dump", log.parent, log.name)
    assert (code, out.count(f"isvalid: false reason: {says}")) == (1, 1)
    code, out, _ = run("dump", log.parent, log.name, "--json")
    assert (code, [one["reason"] for one in json_lines(out) if not one["isvalid"]]) == (1, [says])
    code, out, _ = run("dump", log.parent, log.name, "--from", 18)
    assert (code, says in out) == (0, False), "what is asked for is whole"


def test_verify_says_what_is_damaged_and_what_helps(run, log):
    code, out, _ = run("verify", log.parent)
    assert code == 0
    assert "orders-0: whole: offsets [0, 21)" in out
    damage(log)
    code, out, _ = run("verify", log.parent, log.name)
    assert code == 1
    assert f"damage: {MIDDLE} byte 0 offset 9: CRC-32C" in out
    assert "pushrep log repair" in out
    code, out, _ = run("verify", log.parent, log.name, "--json")
    assert code == 1
    (report,) = json_lines(out)
    assert not report["is_whole"]
    assert report["findings"][0]["kind"] == "damage"


def test_verify_names_a_segment_that_is_not_the_one_that_was_sealed(run, log, tmp_path):
    other = tmp_path / "other" / "orders-0"
    with SegmentLog.open(other, CONFIG) as opened:
        for number in range(7):
            opened.append([b"other %d" % number] * 3, keys=[b"\xff"] * 3, timestamps_ms=1_700_000_000_000 + number)
    (log / MIDDLE).write_bytes((other / MIDDLE).read_bytes())
    code, out, _ = run("verify", log.parent, log.name)
    assert code == 1
    assert re.search(rf"  seal: {MIDDLE} byte 0 offset 9: .* -> pushrep log repair\n", out)


def test_repair_from_a_copy(run, log, tmp_path):
    damage(log)
    copy = tmp_path / "copy" / "orders-0"
    code, out, _ = run("repair", log.parent, log.name, "--from-copy", copy, "--dry-run")
    assert code == 0
    assert "offsets [9, 12) would be taken from the copy" in out
    assert run("verify", log.parent, log.name)[0] == 1
    code, out, _ = run("repair", log.parent, log.name, "--from-copy", copy)
    assert code == 0
    assert f"kept aside: {MIDDLE}.0.corrupt" in out
    assert "whole: offsets [0, 21)" in out
    assert run("verify", log.parent, log.name)[0] == 0


def test_repair_asks_what_to_do(run, log):
    damage(log)
    code, _, err = run("repair", log.parent, log.name)
    assert code == 1
    assert err.startswith("error: ")
    assert "--from-copy" in err


def test_repair_by_a_cut_wants_the_name(run, log):
    damage(log)
    code, _, err = run("repair", log.parent, log.name, "--cut", "orders-1")
    assert code == 2
    assert "orders-0" in err
    code, out, _ = run("repair", log.parent, log.name, "--cut", "orders-0", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["is_whole"]
    assert (report["cut"]["offset"], len(report["cut"]["kept_as"])) == (9, 2)


def test_the_ways_to_repair_exclude_each_other(run, log):
    code, _, err = run("repair", log.parent, log.name, "--cut", "orders-0", "--cut-at", "3")
    assert code == 2
    assert "give one of --from-copy, --cut-at and --cut" in err


def test_truncate_wants_force_below_the_high_watermark(run, log):
    code, _, err = run("truncate", log.parent, log.name, "4")
    assert code == 1
    assert "high watermark" in err
    assert "--force" in err
    assert "force=True" not in err
    before = sum(1 for _ in SegmentLog.open_reader(log).records(0))
    code, out, _ = run("truncate", log.parent, log.name, "4", "--force")
    assert code == 0
    assert "now it ends at 3" in out
    assert run("verify", log.parent, log.name)[0] == 0
    (kept,) = re.findall(r"kept aside: (.*)", out)
    assert len(kept.split(", ")) > 1, "the tail of the segment that was cut, and those behind it"
    for name in sorted(kept.split(", "), key=lambda name: (".log.cut" in name, name)):
        code, out, err = run("restore", log.parent, log.name, log / name)
        assert code == 0, out + err
    assert sum(1 for _ in SegmentLog.open_reader(log).records(0)) == before, "all of it came back"
    code, out, _ = run("truncate", log.parent, log.name, "4", "--force", "--no-keep", "--json")
    assert not any(".log.4" in name for name in json_lines(out)[0]["kept_as"])


def test_rebuild_index(run, log):
    for path in log.glob("*index"):
        path.write_bytes(b"\xff" * 12)
    code, out, _ = run("verify", log.parent, log.name)
    assert code == 1
    assert "-> pushrep log repair" in out
    code, out, _ = run("repair", log.parent, log.name, "--json")
    assert code == 0
    assert len(json.loads(out)["rebuilt"]) == 6
    assert run("verify", log.parent, log.name)[0] == 0


@pytest.mark.parametrize("command", ["repair", "truncate"])
def test_whoever_writes_keeps_the_tools_out(run, log, command):
    arguments = [command, log.parent, log.name, *(["3", "--force"] if command == "truncate" else [])]
    with SegmentLog.open(log, CONFIG):
        code, _, err = run(*arguments)
    assert code == 1
    assert f"process {os.getpid()}" in err or str(os.getpid()) in err


@pytest.mark.parametrize("command", ["ls", "describe", "dump", "verify", "repair", "truncate"])
def test_no_log_is_a_refusal_of_one_line_and_makes_none(run, tmp_path, command):
    nowhere = tmp_path / "orders-7"
    name = [] if command == "ls" else ["orders-0"]
    code, _, err = run(command, nowhere, *name, *(["3"] if command == "truncate" else []))
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not nowhere.exists()


def test_what_was_cut_comes_back_where_it_fits(run, log):
    with SegmentLog.open(log, CONFIG) as opened:
        before = list(opened.records(0))
        opened.truncate_to(4, force=True, keep=True)
    (tail,) = log.glob("*.log.*.cut")
    (later,) = [file for file in sorted(log.glob("*.log.cut")) if file.name.startswith(MIDDLE)]
    assert run("restore", log.parent, log.name, later)[0] == 1, "a gap would be left"
    code, out, _ = run("restore", log.parent, log.name, tail, "--dry-run")
    assert (code, "would put back 6 records, offsets [3, 9)" in out) == (0, True), out
    with SegmentLog.open_reader(log) as reader:
        assert reader.log_end_offset == 3
    for file in [tail, *sorted(log.glob("*.log.cut"))]:
        code, out, err = run("restore", log.parent, log.name, file, "--json")
        assert code == 0, out + err
    assert run("restore", log.parent, log.name, tail)[0] == 1, "it is back"
    with SegmentLog.open(log, CONFIG) as opened:
        assert list(opened.records(0)) == before
        opened.truncate_to(4, force=True, keep=False)
        opened.append(b"another")
    code, out, _ = run("restore", log.parent, log.name, tail)
    assert (code, "does not fit: it begins with offset 3, the log ends at 4" in out) == (1, True), out
    assert run("verify", log.parent, log.name)[0] == 0


def test_a_file_that_no_cut_left_is_not_restored(run, log):
    code, _, err = run("restore", log.parent, log.name, log / MIDDLE)
    assert code != 0
    assert "none that a cut leaves" in err


def test_of_a_torn_tail_the_whole_batches_come_back(run, log):
    with SegmentLog.open(log, CONFIG) as opened:
        opened.truncate_to(4, force=True, keep=True)
    (tail,) = log.glob("*.log.*.cut")
    tail.write_bytes(tail.read_bytes()[:-1])
    code, out, _ = run("restore", log.parent, log.name, tail, "--json")
    (report,) = json_lines(out)
    assert (code, report["start_offset"], report["end_offset"]) == (0, 3, 6)
    assert "the file ends inside the batch" in report["stopped"]
    with SegmentLog.open(log, CONFIG) as opened:
        opened.truncate_to(3, force=True, keep=False)
    code, out, _ = run("restore", log.parent, log.name, tail)
    rest = "  the rest of the file was not used: byte 106, offset 6: 105 bytes of 106: the file ends inside the batch"
    assert (code, out.splitlines()[1]) == (0, rest)
    assert run("verify", log.parent, log.name)[0] == 0


def test_a_log_is_named_by_its_directory_and_name_and_a_refusal_says_how(run, log):
    for command in ("describe", "verify"):
        assert run(command, log.parent, "orders")[0] == 0, "all logs of the topic"
        code, _, err = run(command, log)
        assert (code, err) == (1, f"error: {log} is one log: give its directory and its name, {log.parent} orders-0\n")
    code, _, err = run("repair", log.parent, "ordres-0")
    assert (code, err) == (1, f"error: {log.parent} has no log ordres-0; it has orders-0\n")
    SegmentLog.open(log.parent / "orders-1", CONFIG).close()
    code, _, err = run("truncate", log.parent, "orders", "3")
    assert (code, err) == (1, "error: orders names 2 logs: give one of orders-0, orders-1\n")
    code, _, err = run("dump", log.parent)
    assert code == 2
    assert "orders-0 say" in err


def test_a_repair_of_a_whole_log_says_that_it_changed_nothing(run, log):
    for option, would in (("--dry-run", "would be"), ("--cut=orders-0", "was")):
        code, out, _ = run("repair", log.parent, log.name, option)
        assert (code, out.splitlines()[0]) == (0, f"orders-0: nothing {would} changed"), out


def test_a_torn_tail_is_told_and_is_no_damage(run, log):
    (log.parent / ".pushrep_cleanshutdown").unlink()
    last = log / "00000000000000000018.log"
    last.write_bytes(last.read_bytes() + b"torn")
    code, out, _ = run("verify", log.parent, log.name)
    torn = f"  torn tail, above the last flush; the next open cuts it off: {last.name} byte 106 offset 21: "
    assert (code, torn in out) == (0, True), out
