"""`pushrep status`: outboxes, slots, nodes and logs, open in another process or closed, as one object a look."""

import json
import os
import shlex
import signal
import sys
from uuid import UUID

import pytest

from pushrep import Acks, Outbox, OutboxConfig, ReplayClient, ReplayRequest
from pushrep.cli import status as cli_status
from pushrep.cli.main import run
from pushrep.cli.status import look_at
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import KafkaDestination, TopicMissing
from pushrep.kafka.answers import Code
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, read_progress, write_progress
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.outbox.status import DestinationStatus, StoppedPartition
from pushrep.replay import FOLLOW
from pushrep.replicate import replica_node
from pushrep.status import PROBLEMS, Problem
from pushrep.wire.replay_messages import ReplayEndReason
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until
from tests.programs import PythonProgram


@pytest.fixture
def look(capfd):
    """The places of one look, and its exit code."""

    def call(*arguments):
        capfd.readouterr()
        code = run(["status", *map(str, arguments), "--json"])
        sys.stdout.flush()
        found = json.loads(capfd.readouterr().out)
        assert found["version"] == 1
        return code, found["places"]

    return call


def test_a_replay_session_of_a_node_is_stopped_from_outside(world, capfd, caplog):
    caplog.set_level("INFO", "pushrep.node.audit")
    world.node(1)
    node = world.nodes[1]

    def call(*arguments):
        capfd.readouterr()
        code = run(["replica", "stop-session", *map(str, arguments)])
        sys.stdout.flush()
        return code, capfd.readouterr().out

    with open_outbox(world, 1) as outbox, HandoverSocket(node), ReplayClient(str(node.address)) as client:
        outbox.append(0, b"a").result(WAIT_S)
        with client.replay(ReplayRequest(recording="orders-0", length=FOLLOW)) as replay:
            records = iter(replay)
            assert next(records).value == b"a"
            (session,) = look_at(str(node.directory))[0]["replays"]["sessions"]
            assert (session["state"], session["position"]) == ("replay", 1)
            number = f"{session['session_id']:016x}"
            assert call(node.directory, "nothing")[0] == 2
            assert "STOP_REPLAY" not in caplog.text
            assert call(node.directory, number) == (0, f"session {number} was stopped\n")
            assert list(records) == []
            assert replay.end_reason is ReplayEndReason.STOPPED
        assert call(node.directory, number)[1].endswith("is not running\n")
    told = f"of user {os.getuid()}' calls STOP_REPLAY: session_id='{session['session_id']}'"
    assert caplog.text.count(told) == 2
    assert call(node.directory, number)[0] == 1, "nobody answers any more"


@pytest.fixture
def standbys_stay(monkeypatch):
    """A standby's last state stays, however old it is."""
    monkeypatch.setattr(replica_node, "_STANDBY_MS", 1 << 40)


def words(place):
    return [one["problem"] for one in place["problems"]]


def test_an_outbox_and_the_nodes_of_its_copies_in_one_look(world, look, capfd, standbys_stay):
    world.node(1)
    world.node(2)
    near = world.nodes[1]
    with open_outbox(world, 1, 2, partitions=2, acks=Acks.ALL, min_insync_replicas=3) as outbox, HandoverSocket(near):
        outbox.append_many(1, [b"a", b"b"]).result(WAIT_S)
        wait_for_all(outbox)
        with (
            ReplayClient(str(near.address)) as client,
            client.replay(ReplayRequest(recording="orders-1", length=FOLLOW)) as replay,
        ):
            assert next(iter(replay)).value == b"a"
            near.note_standby(UUID(outbox.identity.outbox_id), "in sync", "the leader is there")
            code, (of_outbox, of_node, by_address) = look(
                outbox.directory, near.directory, near.address, "--partitions"
            )
            assert run(["status", str(outbox.directory), str(near.directory)]) == 0
            shown = capfd.readouterr().out
        assert code == 0
        assert (of_outbox["kind"], of_outbox["state"], of_outbox["problems"]) == ("outbox", "leading", [])
        assert of_outbox["disk"]["used_bytes"] > 0
        assert of_outbox["disk"]["level"] in {"room", "tight", "pressed", "full"}
        assert (of_outbox["damaged"], of_outbox["scrub"]["findings"]) == ([], [])
        assert of_outbox["destinations"] == []
        assert [part["log_end_offset"] for part in of_outbox["parts"]] == [0, 2]
        for node in (of_node, by_address):
            assert (node["kind"], node["state"], node["problems"]) == ("node", "running", [])
            assert node["address"] == str(near.address)
            ends = {log["partition"]: log["log_end_offset"] for log in node["logs"]}
            assert ends[1] == 2
            assert {log["outbox_id"] for log in node["logs"]} == {of_outbox["outbox_id"]}
        for leader in (*of_node["leaders"], *by_address["leaders"]):
            assert leader.pop("silent_ms") >= 0
        of_both = of_node.keys() - {"place", "logs", "refusals", "connections", "disk", "outboxes", "replays"}
        assert {name: by_address[name] for name in of_both} == {name: of_node[name] for name in of_both}
        assert by_address["standbys"][0]["state"] == "in sync"
        assert by_address["disk"]["mount"] == of_node["disk"]["mount"]
        (session,) = of_node["replays"]["sessions"]
        assert by_address["replays"]["sessions"][0]["session_id"] == session["session_id"]
        assert (session["position"], session["lag"]) == (2, 0)
        assert session["credit"] > 0

        assert "leading" in shown
        assert f"{session['session_id']:016x}" in shown
        assert shown.count("scrub: passes") == shown.count("disk ") == 2, "of the outbox and of the node"

        world.nodes[2].stop()
        receipt = outbox.append(0, b"c")
        wait_until(lambda: "under_min_insync" in words(look_at(str(outbox.directory))[0]), "a member went")
        (problem,) = [one for one in look_at(str(outbox.directory))[0]["problems"] if one["blocks"] == "appends"]
        assert problem["subject"] in {"1 of 2 partitions", "2 of 2 partitions"}
        assert problem["why"] == "3 in-sync members are needed, 2 are there"
        assert problem["command"] == f"pushrep status {outbox.directory} --partitions"
        world.node(2)
        receipt.result(WAIT_S)


def test_a_node_at_its_address_tells_as_much_of_long_lists_as_fits_into_a_frame(world, look, standbys_stay):
    world.node(1)
    node = world.nodes[1]
    for number in range(5000):
        node.note_standby(UUID(int=number), "in sync", "x" * 500)
    code, (found,) = look(node.address)
    assert (code, found["pid"], len(found["standbys"])) == (0, os.getpid(), 1000)


def test_what_nobody_has_open_is_told_by_its_files(world, look):
    world.node(1)
    node = world.nodes[1]
    with open_outbox(world, 1) as outbox:
        outbox.append_many(0, [b"a", b"b", b"c"]).result(WAIT_S)
        wait_for_all(outbox)
    node.stop()
    shipped = ShippingProgress(partitions={0: PartitionProgress(1, 1, 0)})
    write_progress(REAL_FILESYSTEM, outbox.directory, {"orders": shipped})
    code, (of_outbox, of_node, of_copy) = look(
        outbox.directory, node.directory, node.directory / outbox.identity.outbox_id
    )
    assert code == 0
    assert (of_outbox["state"], of_outbox["pid"], of_outbox["log_end_offsets"]) == ("closed", None, 3)
    assert (of_outbox["destinations"][0]["name"], of_outbox["destinations"][0]["records"]) == ("kafka:orders", 2)
    assert (of_node["kind"], of_node["state"], of_node["address"]) == ("node", "closed", str(node.address))
    assert [(log["outbox_id"], log["log_end_offset"]) for log in of_node["logs"]] == [(outbox.identity.outbox_id, 3)]
    assert (of_copy["kind"], of_copy["logs"][0]["log_end_offset"]) == ("logs", 3)


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problems_command_runs_as_it_is_printed(tmp_path, name, world, capfd):
    world.node(1)
    of_node = {"log_offline", "log_waits", "damaged", "segment_damaged", "disk_full", "disk_filling"}
    with open_outbox(world, 1) as outbox, HandoverSocket(world.nodes[1]):
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        home, copy = world.nodes[1].directory, f"/{outbox.identity.outbox_id}"
        of_log = copy if name.startswith("disk_") else f"{copy} orders-0"
        printed = [(outbox.directory, "")]
        if name in of_node:
            printed = [(home, of_log), (outbox.directory, of_log.removeprefix(copy))]
        elif "DSN" in PROBLEMS[name].command:
            printed = [(outbox.directory, "orders")]
        elif name == "replay_stalled":
            printed = [(home, f"{7:016x}")]
        for at, argument in printed:
            command = Problem(name, "it", "so", argument=argument).as_dict(shlex.quote(str(at)))["command"]
            program, *arguments = shlex.split(command)
            is_elsewhere = any(word in command for word in ("HOST", "DSN", "skip"))  # of a place that is none here
            arguments += ["--help"] * is_elsewhere
            assert (program, run(arguments)) == ("pushrep", 0), capfd.readouterr().err


def test_slots_are_places_of_their_own_and_what_can_t_be_told_ends_with_3(tmp_path, look):
    with Outbox.open_slot(tmp_path / "w", "orders", 1, "p"), Outbox.open_slot(tmp_path / "w", "orders", 1, "p") as two:
        two.append(0, b"a").result(WAIT_S)
        code, places = look(tmp_path / "w", tmp_path / "no", "127.0.0.1:1")
    assert code == 3
    assert [one["place"] for one in places[:2]] == [str(tmp_path / "w" / f"slot-{n}") for n in (0, 1)]
    assert [one["log_end_offsets"] for one in places[:2]] == [0, 1]
    assert [(one["kind"], words(one)) for one in places[2:]] == [("unknown", ["not_answering"])] * 2
    mistyped, away = (one["problems"][0] for one in places[2:])
    assert mistyped["blocks"] == "nothing"
    assert (away["subject"], away["blocks"]) == ("127.0.0.1:1", "appends")
    assert "127.0.0.1:1" not in away["why"], "the subject says it"


def test_what_nobody_knows_blocks_nothing_and_what_nobody_reads_is_said(tmp_path, look, capfd):
    code, (empty,) = look(tmp_path)
    assert (code, empty["kind"], [(one["problem"], one["blocks"]) for one in empty["problems"]]) == (
        3, "unknown", [("not_answering", "nothing")],
    )  # fmt: skip
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        assert run(["status", str(outbox.directory)]) == 0
        assert "scrub: passes 0, none has ended;" in capfd.readouterr().out
        outbox.log(0).scrub.run_pass()
        assert run(["status", str(outbox.directory)]) == 0
        assert "scrub: passes 1, the last ended 0." in capfd.readouterr().out
    for place in (tmp_path / "o", tmp_path / "o" / "orders-0"):
        assert run(["status", str(place)]) == 0
        assert f"nobody looks for damage: pushrep log verify {place}\n" in capfd.readouterr().out


def test_damage_that_an_opening_met_is_a_problem_with_its_time_and_its_log(tmp_path, look):
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        outbox.append_many(0, [b"a", b"b"]).result(WAIT_S)
        outbox.append(0, b"c").result(WAIT_S)
    segment = tmp_path / "o" / "orders-0" / f"{0:020d}.log"
    data = bytearray(segment.read_bytes())
    data[-1] ^= 0x10
    segment.write_bytes(data)
    (tmp_path / "o" / ".pushrep_cleanshutdown").unlink()
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        code, (found,) = look(outbox.directory)
        assert (code, words(found)) == (1, ["damaged"])
        (problem,) = found["problems"]
        assert problem["since_ms"] > 0
        assert problem["command"] == f"pushrep log verify {outbox.directory} orders-0"


HOLDS = """
import os, sys
from pushrep import KafkaDestination, Outbox, OutboxConfig
given = {"kafka": KafkaDestination(bootstrap_servers="127.0.0.1:1"), "config": OutboxConfig(open_timeout_s=0.0)}
outbox = Outbox.open_slot(sys.argv[1], "orders", 1, "p", **given)
outbox.append(0, b"left").result(60)
print("open", flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_process_that_hangs_is_named_soon_and_what_it_leaves_when_it_dies_at_once_waits(tmp_path, look):
    """faults S1, B8: 3 is "could not tell"; a slot is shipped, or named, also if no topic was reached before."""
    slot = tmp_path / "workers" / "slot-0"
    with PythonProgram("-c", HOLDS, slot.parent, has_input=True) as program:
        try:
            assert program.stdout.readline() == "open\n"
            program.send_signal(signal.SIGSTOP)
            code, (found,) = look(slot)
            assert (code, words(found)) == (3, ["not_answering"])
            assert "no answer within 5.0 s" in found["problems"][0]["why"]
        finally:
            program.kill()
    for path in [slot, *slot.rglob("*")]:
        os.utime(path, (0, 60))
    code, (found,) = look(slot)
    assert (code, words(found)) == (1, ["slot_waits"])
    assert "1 records are not shipped to topic orders" in found["problems"][0]["why"]


def test_a_destination_that_is_refused_at_once_is_not_remembered(tmp_path, monkeypatch):
    """A mistyped topic would hold the logs' records until it is given up."""

    def missing(_destination, topic):
        raise TopicMissing(topic)

    monkeypatch.setattr("pushrep.kafka.sink.look_at_topic", missing)
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        outbox.append(0, b"a").result(WAIT_S)
    with pytest.raises(TopicMissing):
        Outbox.open(tmp_path / "o", "orders", 1, "p", kafka=KafkaDestination(bootstrap_servers="127.0.0.1:1"))
    assert read_progress(REAL_FILESYSTEM, tmp_path / "o") == {}


def test_parked_records_are_told_of_a_closed_outbox_and_a_refused_one_with_its_command(tmp_path, look):
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park")
    with Outbox.open(tmp_path / "o", "orders", 1, "p", kafka=kafka, config=OutboxConfig(open_timeout_s=0.0)) as outbox:
        outbox.append_many(0, [b"a", b"b"]).result(WAIT_S)
        (record,) = outbox.log(0).records(0, 1)
        refused = RefusedByTopic("orders", 0, 0, directory=outbox.directory, code=Code.INVALID_RECORD, why="no")
        outbox.facts.shipping.parking.park(record, refused, 1_000)
    code, (found,) = look(tmp_path / "o")
    assert (code, words(found)) == (1, ["records_parked"])
    assert (found["problems"][0]["since_ms"], found["destinations"][0]["parked"]) == (1_000, 1)
    stopped = [StoppedPartition(0, 7, "too large", 1, is_refused=True), StoppedPartition(1, 9, "no right", 1)]
    told = DestinationStatus(name="kafka:orders", topic="orders", records=1, stopped=tuple(stopped)).find_problems()
    assert [one.as_dict("o")["command"] for one in told] == [
        "pushrep outbox skip 7 --partition 0 --topic orders --directory o --reason WHY",
        "pushrep status o --partitions",
    ]


def test_an_outbox_whose_process_does_not_answer_is_a_problem(tmp_path):
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        (outbox.directory / "control.sock").unlink()
        (found,) = look_at(str(outbox.directory))
    assert words(found) == ["not_answering"]


def test_the_command_tells_a_service_of_another_process(tmp_path):
    with Outbox.open(tmp_path / "o", "orders", 1, "p") as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        words = ("status", tmp_path / "o", "--json")
        with PythonProgram("-m", "pushrep.cli.main", *words, has_errors=True) as program:
            said, errors = program.stdout.read(), program.stderr.read()
    assert (program.returncode, errors) == (0, "")
    assert json.loads(said)["places"][0]["log_end_offsets"] == 1


def test_a_narrow_terminal_folds_lag_says_its_unit_and_a_problem_its_address_once(world, capfd, monkeypatch):
    world.node(1)
    world.node(2)
    far = str(world.nodes[2].address)
    with open_outbox(world, 1, 2, partitions=2, acks=Acks.LOCAL) as outbox:
        for number in range(10):
            outbox.append(number % 2, b"both").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[2].stop()
        for partition in range(2):
            outbox.append(partition, b"x" * 3000).result(WAIT_S)
        wait_until(lambda: not outbox.lag()[far].in_sync, "it left")  # an idle one would not
        wait_for_all(outbox, world.nodes[1].address)
        wait_until(lambda: outbox.status().members[2].trouble, "it is away")
        (found,) = look_at(str(outbox.directory), with_partitions=True)
        leader, near, away = found["members"]
        assert (leader["is_leader"], leader["lag"]) == (True, None)
        assert (near["lag"]["records"], near["lag"]["in_sync"], near["sessions"]) == (0, 2, 2)
        assert (away["lag"]["records"], away["lag"]["in_sync"], away["address"]) == (2, 0, far)
        assert 6000 <= away["lag"]["size_bytes"] <= 6000 + 2 * 4500
        assert found["in_sync_min"] == 2
        assert found["parts"][0]["in_sync"] == [0, 1]
        assert [session["replica"] for session in found["parts"][1]["sessions"]] == [1, 2]
        assert found["parts"][0]["sessions"][0]["acknowledged"] == 6
        monkeypatch.chdir(outbox.directory.parent)
        for columns in (None, 80, 120):
            monkeypatch.setattr(cli_status, "width", lambda columns=columns: columns)
            capfd.readouterr()
            assert run(["status", "outbox", "--partitions"]) == 1, "a problem"
            lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("  pushrep ")]
            shown = "\n".join(lines)
            assert max(map(len, lines)) <= (columns or 1000)
            assert "2 records, 5.9 KiB" in shown or "2 records, 6" in shown
            assert [text for text in ("0 of 2", "2 of 2", far, "\x1b", "…", "┃") if text in shown] == [
                "0 of 2",
                "2 of 2",
                far,
            ]
            (problem,) = [line for line in lines if line.startswith("! replica_away")]
            assert problem.count(far) == 1
        world.node(2)
