"""Damage in one member is repaired from another while both run: identity O8, over sockets, and with a killed
process.
"""

import json
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.cli import main as cli_main
from pushrep.election.follower import RequestFinding
from pushrep.log import CorruptBatch, LogConfig, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import segment_path
from pushrep.log.errors import RepairRefused
from pushrep.records.header import HEADER_BYTES
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.settings import PushSettings
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import RepairRecordsRequest, RepairRecordsResponse
from tests.integration.conftest import WAIT_S
from tests.integration.outboxes import open_outbox, wait_for_all, wait_until
from tests.programs import PythonProgram

SMALL = LogConfig(segment_bytes=4000, preallocate_bytes=0)
LOOKING = replace(SMALL, verify_last_segments=99)
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, repair_interval_ms=50)


def led(world, *indexes, settings=QUICK):
    """Nodes and the service that leads them, with some sealed segments that all have."""
    members = [world.node(index, log_config=SMALL) for index in indexes]
    service = world.service(members, settings=settings, config=SMALL).start()
    for number in range(40):
        service.append(b"record %04d " % number + bytes(400))
    assert service.wait() is None
    service.wait_for_all()
    return service


def sealed(log):
    bases = sorted(int(path.stem) for path in log.path.glob("*.log"))
    assert len(bases) > 3
    return bases[:-1]


def flip(log, base, at=HEADER_BYTES + 20):
    path = segment_path(log.path, base)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def bytes_of(log):
    return {base: segment_path(log.path, base).read_bytes() for base in sealed(log)}


def cut_short(log, base, whole):
    """Behind the first of its batches, which are of one size."""
    with SegmentLog.open_reader(log.path, isolation="written") as reader:
        (first,) = reader.batches(base, base + 1)
    segment_path(log.path, base).write_bytes(whole[base][: len(first.data)])


def replica_of(world, index):
    [(_, replica)] = world.nodes[index].replicas()
    return replica


def test_o8_a_replica_is_given_what_rotted_while_watermark_and_quorum_stand(world):
    service = led(world, 1)
    replica, ours = replica_of(world, 1), service.logs[0]
    log, leader = replica.log, service.leading.partitions[0].leader
    values = [record.value for record in ours.records(0)]
    seen, stop, wrong = [log.high_watermark], threading.Event(), []

    def read_beside():
        with SegmentLog.open_reader(log.path) as reader:
            while not stop.is_set():
                try:
                    got = [record.value for record in reader.records(0)]
                except CorruptBatch:
                    continue  # it names the damage
                # What is appended meanwhile is readable before `values` knows of it.
                if got != (values + [b"another"] * (len(got) - len(values)))[: len(got)]:
                    wrong.append(got)

    beside = threading.Thread(target=read_beside)
    beside.start()
    try:
        for base in sealed(log)[1:3]:
            flip(log, base)
        assert len(log.scrub.run_pass().findings) == 2
        while log.damaged_segments:
            seen.append(log.high_watermark)
            assert leader.in_sync == {0, 1}
            service.append(b"another")
        values += [b"another"] * (ours.log_end_offset - len(values))
        assert service.wait() is None
    finally:
        stop.set()
        beside.join()
    assert seen == sorted(seen)
    assert not wrong
    assert log.scrub.run_pass().findings == ()
    service.wait_for_all()
    assert bytes_of(log) == bytes_of(ours)
    assert log.scrub.status.repaired == 2
    assert service.leading.troubles() == {}


def test_o8_a_leader_fetches_what_rotted_from_the_member_that_holds_it(world):
    service = led(world, 1, 2)
    ours, one, two = service.logs[0], replica_of(world, 1).log, replica_of(world, 2).log
    first, second = sealed(ours)[:2]
    whole = bytes_of(one)
    flip(one, first)  # who has the same damage can't help, and is helped in the end
    flip(ours, first)
    flip(ours, second)
    one.scrub.run_pass()
    assert len(ours.scrub.run_pass().findings) == 2
    wait_until(lambda: not ours.damaged_segments and not one.damaged_segments, "both are repaired")
    assert bytes_of(ours) == bytes_of(one) == bytes_of(two) == whole
    assert service.leading.repairs.own_trouble == {}


def test_o8_damage_that_a_reader_meets_is_looked_at_and_repaired_at_once(world):
    """The repair does not wait for a pass of the scrub: a new replica can't be filled from there, and its sessions
    end.
    """
    service = led(world, 1)
    ours, whole = service.logs[0], bytes_of(service.logs[0])
    first = sealed(ours)[0]
    flip(ours, first)
    with pytest.raises(CorruptBatch):
        list(ours.records(0))
    wait_until(lambda: ours.scrub.status.repaired == 1, "it was fetched")
    assert bytes_of(ours) == whole
    assert ours.scrub.status.passes == 0
    assert len(list(ours.records(0))) == ours.log_end_offset


def test_o8_what_nobody_holds_is_said_by_name(world):
    service = led(world, 1)
    ours, log = service.logs[0], replica_of(world, 1).log
    base = sealed(ours)[0]
    for each in (ours, log):  # both, before one is found and fetched from the other
        flip(each, base)
    for each in (ours, log):
        each.scrub.run_pass()
    wait_until(lambda: service.leading.troubles().keys() == {0, 1}, "both are shown")
    assert f"{base:020d}.log" in service.leading.troubles()[0]
    assert "CRC-32C" in service.leading.troubles()[1]
    assert service.leading.partitions[0].leader.in_sync == {0, 1}
    assert len(log.damaged_segments) == len(ours.damaged_segments) == 1


def test_o8_what_a_replicas_opening_finds_damaged_is_repaired_and_nothing_is_set_aside(world):
    service = led(world, 1)
    log, ours = replica_of(world, 1).log, service.logs[0]
    end, bases, whole = log.log_end_offset, sealed(log), bytes_of(log)
    world.nodes[1].stop()
    flip(log, bases[1])  # told by a scan alone
    cut_short(log, bases[2], whole)  # told by where it ends
    world.node(1, log_config=LOOKING)
    service.append(b"another")
    assert service.wait() is None
    log = replica_of(world, 1).log
    assert [one.base_offset for one in log.recovery.damaged_segments] == bases[1:3]
    assert "for another member to repair" in str(log.recovery)
    assert (log.damaged_from, log.recovery.log_end_offset) == (None, end)
    wait_until(lambda: not log.damaged_segments, "both are repaired")
    assert bytes_of(log) == bytes_of(ours)
    assert {base: data for base, data in bytes_of(log).items() if base in whole} == whole
    assert not [path.name for path in log.path.iterdir() if path.name.endswith(".log.corrupt")], "none went whole"


def test_o8_what_a_leaders_opening_finds_damaged_comes_from_a_member_or_is_named_while_it_leads_on(world):
    replicas = [world.node(index, log_config=SMALL).index for index in (1, 2)]
    given = {"log_config": SMALL, "push": QUICK}
    with open_outbox(world, *replicas, **given) as outbox:
        for number in range(40):
            assert outbox.append(0, b"record %04d " % number + bytes(400)).result(WAIT_S) == number
        wait_for_all(outbox)
        [ours], [one, two] = outbox.facts.logs.values(), [replica_of(world, index).log for index in replicas]
        identity, whole, bases = outbox.identity, bytes_of(ours), sealed(ours)
    cut_short(ours, bases[1], whole)
    with open_outbox(world, *replicas, **given) as outbox:
        [ours] = outbox.facts.logs.values()
        assert [found.base_offset for found in ours.recovery.damaged_segments] == bases[1:2]
        assert outbox.append(0, b"it leads").result(WAIT_S) == 40
        wait_until(lambda: not ours.damaged_segments, "it was fetched")
        assert {base: data for base, data in bytes_of(ours).items() if base in whole} == whole
        assert outbox.identity.pid_epoch == identity.pid_epoch, "no record was lost"
    for log in (ours, one, two):
        flip(log, bases[2])
    with open_outbox(world, *replicas, **given | {"log_config": LOOKING}) as outbox:
        [ours] = outbox.facts.logs.values()
        assert outbox.append(0, b"nothing else is lost").result(WAIT_S) == 41
        wait_until(lambda: f"[{bases[2]}, {bases[3]})" in str(outbox.status().members), "it is named")
        assert "pushrep log repair" in str(outbox.status().members)
        assert [found.base_offset for found in ours.damaged_segments] == [bases[2]]
        assert ours.log_end_offset == 42


def test_o8_verify_says_which_members_hold_what_is_damaged(world, capsys):
    replicas = [world.node(index, log_config=SMALL).index for index in (1, 2)]
    with open_outbox(world, *replicas, log_config=SMALL, push=QUICK) as outbox:
        for number in range(40):
            outbox.append(0, b"record %04d " % number + bytes(400)).result(WAIT_S)
        wait_for_all(outbox)
        [ours] = outbox.facts.logs.values()
        base, following = sealed(ours)[1:3]
    flip(replica_of(world, 2).log, base)
    flip(ours, base)
    asked = ["log", "verify", str(ours.path.parent), ours.path.name]
    assert cli_main.run(asked) == 1
    said = capsys.readouterr().out
    assert f"[{base}, {following}): member 1, {world.nodes[1].address}, holds it\n" in said
    assert f"[{base}, {following}): member 2, {world.nodes[2].address}, does not hold it: " in said
    world.nodes[1].stop()
    assert cli_main.run([*asked, "--json"]) == 1
    gone, rotten = json.loads(capsys.readouterr().out)["members"]
    assert (gone["member"], rotten["member"], gone["start"]) == (1, 2, base)
    assert "refused" in gone["why_not"]


def test_o8_what_is_damaged_below_a_log_start_inside_its_segment_is_repaired(world):
    """No reader gets these records, but a reader of later records in this segment passes them."""
    service = led(world, 1)
    log, ours = replica_of(world, 1).log, service.logs[0]
    base = sealed(ours)[1]
    ours.flush()
    ours.delete_records(base + 3)
    service.append(b"another")
    wait_until(lambda: log.log_start_offset == base + 3, "the replica's begins there, too")
    with pytest.raises(OffsetOutOfRange):
        ours.read(base, 1)
    whole = segment_path(log.path, base).read_bytes()
    assert whole.startswith(ours.read_to_repair(base, 1))
    flip(log, base)
    assert len(log.scrub.run_pass().findings) == 1
    wait_until(lambda: not log.damaged_segments, "it is repaired")
    assert segment_path(log.path, base).read_bytes() == whole


def test_o8_what_is_damaged_below_a_leaders_log_start_inside_its_segment_is_fetched(world):
    service = led(world, 1)
    log, ours = replica_of(world, 1).log, service.logs[0]
    base = sealed(ours)[1]
    ours.flush()
    ours.delete_records(base + 3)
    service.append(b"another")
    wait_until(lambda: log.log_start_offset == base + 3, "the replica's begins there, too")
    whole = segment_path(ours.path, base).read_bytes()
    flip(ours, base)
    assert len(ours.scrub.run_pass().findings) == 1
    wait_until(lambda: not ours.damaged_segments, "it is repaired")
    assert segment_path(ours.path, base).read_bytes() == whole


def test_o8_who_leads_no_more_repairs_nothing(world):
    service = led(world, 1)
    log, tp = replica_of(world, 1).log, service.leading.partitions[0].tp
    service.close()
    base = sealed(log)[0]
    flip(log, base)
    log.scrub.run_pass()
    rotten = bytes_of(log)
    request = RepairRecordsRequest(
        outbox_id=world.outbox_id, tp=tp, grant_epoch=service.grant.epoch - 256, base_offset=base
    )
    with ReplicaClient(world.nodes[1].address) as client:
        assert client.ask(request, RepairRecordsResponse).error_code is ErrorCode.FENCED_LEADER_EPOCH
        foreign = replace(request, outbox_id=UUID(int=9), grant_epoch=service.grant.epoch)
        assert client.ask(foreign, RepairRecordsResponse).error_code is ErrorCode.UNKNOWN_TOPIC_ID
        mine = replace(request, grant_epoch=service.grant.epoch)
        assert client.ask(mine, RepairRecordsResponse).wanted_offset == base
        refused = client.ask(replace(mine, records=(b"no batch at all",)), RepairRecordsResponse)
        assert refused.error_code is ErrorCode.CORRUPT_MESSAGE
    assert bytes_of(log) == rotten


def test_o8_a_repair_that_is_given_up_for_now_is_no_error(world, caplog):
    service = led(world, 1, settings=replace(QUICK, repair_interval_ms=0))
    log, ours, repairs = replica_of(world, 1).log, service.logs[0], service.leading.repairs
    whole = bytes_of(ours)
    flip(log, sealed(log)[1])
    flip(ours, sealed(ours)[2])
    assert len(log.scrub.run_pass().findings) == len(ours.scrub.run_pass().findings) == 1
    caplog.clear()
    with ReplicaClient(world.nodes[1].address) as client:
        for given_up_at in range(6):  # as when the outbox closes, or a session has to begin first
            asked = iter([False] * given_up_at)
            repairs.repair(service.replicas[0], client, lambda asked=asked: next(asked, True))
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert repairs.repair(service.replicas[0], client, lambda: False) is None
    assert bytes_of(ours) == bytes_of(log) == whole


def test_o8_a_replica_that_waits_for_an_operator_or_is_closed_takes_no_repair(world, monkeypatch):
    service = led(world, 1, settings=replace(QUICK, repair_interval_ms=0))
    replica = replica_of(world, 1)
    base = sealed(replica.log)[0]
    flip(replica.log, base)
    replica.log.scrub.run_pass()
    batches = [service.logs[0].read(base, 1 << 20)]
    replica.finding = RequestFinding.OTHER_BYTES
    with pytest.raises(RepairRefused, match="waits for an operator: OTHER_BYTES"):
        replica.repair(base, batches)
    replica.finding = None
    close = replica.log.close

    def ask_while_it_closes():
        with suppress(RepairRefused):
            replica.repair(base, ())
        close()

    assert replica.repair(base, ()) == base
    monkeypatch.setattr(replica.log, "close", ask_while_it_closes)
    replica.close()
    assert not list(replica.log.path.glob("*.repair"))


KILLED = """
import os, signal, sys
from contextlib import closing
from uuid import UUID
from pushrep.log import LogConfig, SegmentLog
from pushrep.env import RealFilesystem

class Dying(RealFilesystem):
    left = None
    def _step(self):
        if self.left is not None:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
    def rename(self, source, target):
        self._step(); super().rename(source, target)
    def remove(self, path):
        self._step(); super().remove(path)
    def sync_directory(self, directory):
        self._step(); super().sync_directory(directory)

filesystem = Dying()
config = LogConfig(segment_bytes=4000, preallocate_bytes=0)
leader = SegmentLog.open_reader(sys.argv[1], isolation="written")
log = SegmentLog.open(sys.argv[2], config, has_replicas=True, filesystem=filesystem)
[found] = log.scrub.run_pass().findings
with closing(log.repair_segment(found.base_offset)) as repair:
    filesystem.left = int(sys.argv[3])
    while not repair.is_done:
        repair.add(leader.read(repair.wanted, 700))
filesystem.left = None
print("done")
"""


@pytest.mark.parametrize("has_seal", [True, False])
def test_o8_a_kill_in_the_middle_of_a_repair_leaves_it_right_or_reported(tmp_path, has_seal):
    with SegmentLog.open(tmp_path / "leader" / "orders-0", SMALL, log_id=UUID(int=3)) as leader:
        for number in range(40):
            leader.append([b"record %04d " % number + bytes(400)])
        whole, steps = bytes_of(leader), 0
        base = sealed(leader)[1]
        while True:
            path = tmp_path / f"copy{steps}" / "orders-0"
            with SegmentLog.open(path, SMALL, log_id=UUID(int=3), has_replicas=True) as copy:
                copy.append_as_is(list(leader.batches(0)))
            flip(copy, base)
            if not has_seal:
                segment_path(path, base, ".seal").unlink()
            with PythonProgram("-c", KILLED, leader.path, path, steps, has_errors=True) as run:
                errors = run.stderr.read()
            assert run.returncode in {0, -signal.SIGKILL}, errors
            with SegmentLog.open(path, SMALL, has_replicas=True) as copy:
                assert not list(path.glob("*.repair"))
                found = copy.scrub.run_pass().findings
                assert found or bytes_of(copy) == whole
                assert copy.log_end_offset == leader.log_end_offset
                if run.returncode == 0:
                    assert not found
                    break
            steps += 1
    assert steps >= (2 if has_seal else 4)
