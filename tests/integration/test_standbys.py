"""A leader that can't work resigns in time, and another member takes over, unless an operator's hold or the pause after
the last takeover prevents it.
"""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import wraps

import pytest
from prometheus_client import CollectorRegistry

from filtering import StreamMetadata, producer_id
from pushrep import KafkaDestination, LogConfig, Outbox, ReplicaNode
from pushrep.cli.main import run
from pushrep.election.errors import CantStandBy, NotLeader
from pushrep.env import REAL_FILESYSTEM
from pushrep.env.filesystem import RealFile
from pushrep.health import HealthSettings
from pushrep.outbox import DeliveryFailed, StandbyCancelled, StandbyState, standby
from pushrep.outbox.creating import create_outbox
from pushrep.outbox.directory_handover import HandoverSocket, handed_over
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.positions import POSITIONS_NAME, decode_positions
from pushrep.outbox.promotion import promote
from pushrep.outbox.replication import Replication
from pushrep.outbox.status import LeadingState
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.member_clients import MemberAnswers, MemberClients
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.sockets import Address
from pushrep.status.metrics import StatusCollector
from pushrep.values import to_json
from tests.integration.outboxes import wait_until
from tests.ports import reserve
from tests.programs import PUSHREP
from tests.support.outbox_arguments import outbox_arguments

WAIT_S = 60
TAKEOVER_MS = 2_000


class Members:
    """Nodes in this process, each with its directory."""

    def __init__(self, root, stack, count=3):
        settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
        self.data = [root / f"data-{index}" for index in range(count)]
        self.nodes = [stack.enter_context(ReplicaNode(data, settings)) for data in self.data]
        for node in self.nodes:
            stack.enter_context(HandoverSocket(node))
        self.addresses = [str(node.address) for node in self.nodes]


def goodbye_only(monkeypatch):
    """Leaders that close name no successor, as if they did not know who stands by."""
    monkeypatch.setattr(Replication, "has_standbys", False)


class Instance:
    """An instance of the service: it stands by in a thread until it leads."""

    def __init__(self, data, *, also_tell=lambda _state: None, **settings):
        self.also_tell = also_tell
        self.told, self.cancel, self.leads, self.deposed = [], threading.Event(), threading.Event(), threading.Event()
        self.outbox, self.changed, self.failed = None, threading.Condition(), None
        self.thread = threading.Thread(target=self.run, args=(data,), kwargs=settings)
        self.thread.start()

    def run(self, data, **settings):
        settings = {"takeover_after_ms": TAKEOVER_MS, "log_config": LogConfig(preallocate_bytes=0), **settings}
        try:
            self.outbox = Outbox.stand_by(
                data, "orders", 1, "billing", **outbox_arguments(on_state=self.tell, cancel=self.cancel, **settings)
            )
            self.leads.set()
        except StandbyCancelled:
            pass
        except CantStandBy as error:
            self.failed = error

    def tell(self, state, why):
        with self.changed:
            self.told.append((state, why))
            self.changed.notify_all()
        if state is StandbyState.DEPOSED:
            self.deposed.set()
        self.also_tell(state)

    def wait_for(self, why, behind=None):
        """Wait until the service stands by and reports it; after it was in another state, if one is given."""

        def is_told():
            states = [state for state, _ in self.told]
            told = self.told if behind is None else self.told[states.index(behind) :] if behind in states else []
            return any(state is StandbyState.STANDING_BY and why in reason for state, reason in told)

        with self.changed:
            assert self.changed.wait_for(is_told, WAIT_S), self.told

    def wait_until_it_leads(self):
        assert self.leads.wait(WAIT_S), self.told

    def end(self):
        self.cancel.set()
        self.thread.join(WAIT_S)
        if self.outbox is not None:
            self.outbox.close()


@pytest.fixture
def members(tmp_path):
    with ExitStack() as stack:
        yield Members(tmp_path, stack)


def test_without_a_majority_it_resigns_and_says_whom_it_misses(members):
    """From then on it appends nothing, and ships nothing; the broker is away."""
    create_outbox(members.data[0], members.addresses, "orders")
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1")
    instance = Instance(members.data[0], kafka=kafka, open_timeout_s=1)
    try:
        instance.wait_until_it_leads()
        assert instance.outbox.append(0, b"first").result(WAIT_S) == 0
        assert not instance.deposed.wait(1.25 * TAKEOVER_MS / 1000), "an idle one whose members answer leads on"
        for node in members.nodes[1:]:
            node.stop()
        assert instance.deposed.wait(WAIT_S)
        assert "members [1, 2] did not answer" in instance.told[-1][1]
        with pytest.raises(NotLeader, match="no majority"):
            instance.outbox.append(0, b"second")
        status = instance.outbox.status()
        assert status.state is LeadingState.RESIGNED
        assert instance.outbox.facts.shipping.sink._stopping.wait(WAIT_S)
        assert "not_leading" in {one.name for one in status.problems()}
    finally:
        instance.end()


def test_with_a_full_disk_it_resigns_and_one_with_room_takes_over(members, monkeypatch):
    """The leader notifies the members that it resigns, so that no standby waits for `takeover_after_ms`."""
    create_outbox(members.data[0], members.addresses, "orders")
    first = Instance(members.data[0])
    second = None
    try:
        first.wait_until_it_leads()
        assert first.outbox.append(0, b"first").result(WAIT_S) == 0
        second = Instance(members.data[1])
        usage = type(REAL_FILESYSTEM).usage

        def filled(self, path):
            found = usage(self, path)
            return type(found)(found.total_bytes, found.total_bytes) if members.data[0] in path.parents else found

        monkeypatch.setattr(type(REAL_FILESYSTEM), "usage", filled)
        second.wait_until_it_leads()
        assert first.deposed.is_set()
        assert "the disk is too full" in next(why for state, why in first.told if state is StandbyState.DEPOSED)
        first.outbox.close()
        assert second.outbox.append(0, b"second").result(WAIT_S) == 1
    finally:
        first.end()
        if second is not None:
            second.end()


def test_values_and_keys_are_serialized_before_a_takeover_and_behind_it(members):
    create_outbox(members.data[0], members.addresses, "orders", carrier="header")
    settings = {"carrier": "header", "serializer": to_json, "key_serializer": str.encode, "partition_by": "key"}
    first, second = Instance(members.data[0], **settings), None
    try:
        first.wait_until_it_leads()
        assert first.outbox.append(value={"order": 1}, key="ada").result(WAIT_S) == 0
        second = Instance(members.data[1], **settings)
        second.wait_for("")
        first.end()
        second.wait_until_it_leads()
        assert second.outbox.append(value={"order": 2}, key="ada").result(WAIT_S) == 1
        found = [(record.key, record.value) for record in second.outbox.log(0).records(0)]
        assert found == [(b"ada", b'{"order":1}'), (b"ada", b'{"order":2}')]
    finally:
        first.end()
        if second is not None:
            second.end()


def test_with_a_log_whose_sync_failed_it_resigns_and_another_takes_over(members, monkeypatch):
    """Records that were appended then may be delivered; the next leader's log shows whether they were."""
    create_outbox(members.data[0], members.addresses, "orders")
    first, second, sync = Instance(members.data[0]), None, RealFile.sync

    def failing(file):
        if members.data[0] in file.path.parents:
            raise OSError(errno.EIO, "the disk is gone")
        sync(file)

    try:
        first.wait_until_it_leads()
        assert first.outbox.append(0, b"first").result(WAIT_S) == 0
        second = Instance(members.data[1])
        second.wait_for("was in contact")
        monkeypatch.setattr(RealFile, "sync", failing)
        with pytest.raises(DeliveryFailed):
            first.outbox.append(0, b"second").result(WAIT_S)
        second.wait_until_it_leads()
        assert first.deposed.is_set()
        assert "a sync failed" in next(why for state, why in first.told if state is StandbyState.DEPOSED)
        assert second.outbox.append(0, b"third").result(WAIT_S) in {1, 2}
    finally:
        monkeypatch.undo()
        first.end()
        if second is not None:
            second.end()


def test_a_standby_that_is_behind_fetches_what_others_have_before_it_leads(members):
    """The standby's node was away when all records were acknowledged, and its service is the only one left."""
    create_outbox(members.data[0], members.addresses, "orders")
    first, last = Instance(members.data[0], replica_lag_max_ms=200), None
    try:
        first.wait_until_it_leads()
        members.nodes[2].stop()
        for number in range(5):
            assert first.outbox.append(0, b"value").result(WAIT_S) == number
        first.outbox.close()
        settings = NodeSettings(address=members.nodes[2].address, allow=frozenset({"any"}))
        with ReplicaNode(members.data[2], settings) as node, HandoverSocket(node):
            last = Instance(members.data[2])
            last.wait_until_it_leads()
            assert last.outbox.append(0, b"sixth").result(WAIT_S) == 5
            last.end()
    finally:
        first.end()
        if last is not None:
            last.end()


def test_a_standby_whose_disk_refuses_what_it_fetches_stands_by_until_it_has_room(members, monkeypatch):
    """It raised instead: a service that is started again at once kept its node from answering the others."""
    create_outbox(members.data[0], members.addresses, "orders")
    first, last, write_at = Instance(members.data[0], replica_lag_max_ms=200), None, RealFile.write_at
    is_full = threading.Event()
    is_full.set()

    def refused(file, data, position):
        if is_full.is_set() and members.data[2] in file.path.parents and file.path.suffix == ".log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        return write_at(file, data, position)

    try:
        first.wait_until_it_leads()
        members.nodes[2].stop()
        assert first.outbox.append(0, b"first").result(WAIT_S) == 0
        first.outbox.close()
        monkeypatch.setattr(RealFile, "write_at", refused)
        settings = NodeSettings(address=members.nodes[2].address, allow=frozenset({"any"}))
        with ReplicaNode(members.data[2], settings) as node, HandoverSocket(node):
            last = Instance(members.data[2])
            last.wait_for("free space on the disk")
            is_full.clear()
            last.wait_until_it_leads()
            assert last.outbox.append(0, b"second").result(WAIT_S) == 1
            last.end()
    finally:
        is_full.clear()
        first.end()
        if last is not None:
            last.end()


def test_who_stands_by_knows_the_positions_before_it_takes_over(members):
    """Otherwise it would read its whole log first, and a long one takes longer than the contract allows."""
    granted = create_outbox(members.data[0], members.addresses, "orders")
    first, second = Instance(members.data[0]), None
    path = members.data[1] / str(granted.outbox_id) / "orders-0" / POSITIONS_NAME
    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1])
        for number in range(20):
            first.outbox.append(0, b"value", metadata=StreamMetadata(7, 0, number)).result(WAIT_S)
        pause = threading.Event()
        for _ in range(20 * WAIT_S):
            known = None
            with suppress(FileNotFoundError):  # it is thrown away just now, or not made yet
                known = decode_positions(path.read_bytes(), "key")
            if known is not None and known.end_offset == 20:
                break
            pause.wait(0.05)
        assert known.highest == {(7, 0): 19}
        first.end()
        second.wait_until_it_leads()
        assert second.outbox.last_metadata(7, 0) == 19
    finally:
        first.end()
        if second is not None:
            second.end()


def test_with_a_topic_old_records_go_after_a_week_without_a_setting(members):
    """Also for an outbox that other members led first, whose outbox.json has no setting. The broker is away."""
    create_outbox(members.data[0], members.addresses, "orders")
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1")
    instance = Instance(members.data[0], kafka=kafka, open_timeout_s=1)
    try:
        instance.wait_until_it_leads()
        assert instance.outbox.log(0).config.retention == (7 * 86_400_000, None)
    finally:
        instance.end()


def test_of_two_that_look_at_once_one_leads_and_the_other_stands_by_again(members, monkeypatch):
    """Without the leader's node the two need each other, and the node of neither answers while both look."""
    goodbye_only(monkeypatch)
    create_outbox(members.data[0], members.addresses, "orders")
    both_look, looked, instances = threading.Barrier(2, timeout=WAIT_S), set(), [Instance(members.data[0])]

    def look(state):
        """The first time they wait for each other, when nothing was asked yet."""
        if state is StandbyState.LOOKING and threading.get_ident() not in looked:
            looked.add(threading.get_ident())
            both_look.wait()

    try:
        instances[0].wait_until_it_leads()
        instances += [Instance(data, also_tell=look, takeover_pause_ms=0) for data in members.data[1:]]
        for one in instances[1:]:
            one.wait_for("was in contact")
        instances[0].outbox.close()
        members.nodes[0].stop()
        while not any(one.leads.wait(0.05) for one in instances[1:]):
            assert all(one.thread.is_alive() or one.leads.is_set() for one in instances[1:])
        leader, other = sorted(instances[1:], key=lambda one: not one.leads.is_set())
        assert leader.outbox.append(0, b"first").result(WAIT_S) == 0
        other.wait_for("was in contact", behind=StandbyState.LOOKING)
        assert not other.leads.is_set()
        assert leader.outbox.append(0, b"second").result(WAIT_S) == 1
    finally:
        for one in instances:
            one.end()


def ask_slowly(monkeypatch):
    """All members have refused before the candidate continues, also on a busy machine."""
    ask, may_ask_again, decided = MemberAnswers.ask, MemberAnswers.may_ask_again, threading.Event()

    def asked(answers, name, question):
        decided.clear()
        ask(answers, name, question)
        decided.wait(1)

    def looked(answers):
        found = may_ask_again(answers)
        decided.set()
        return found

    monkeypatch.setattr(MemberAnswers, "ask", asked)
    monkeypatch.setattr(MemberAnswers, "may_ask_again", looked)


@pytest.mark.parametrize("is_busy", [False, True])
def test_one_look_is_enough_where_a_member_that_is_needed_is_let_go_meanwhile(members, monkeypatch, caplog, is_busy):
    """The leader's node is gone, and the third member's directory is in use, as by another one that looks."""
    monkeypatch.setattr(standby, "_ROUND_S", (WAIT_S, WAIT_S))
    granted = create_outbox(members.data[0], members.addresses, "orders")
    first, second = Instance(members.data[0]), None
    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1], open_timeout_s=WAIT_S)
        second.wait_for("was in contact")
        with handed_over(members.data[2] / str(granted.outbox_id), granted.outbox_id):
            members.nodes[0].stop()
            if is_busy:
                ask_slowly(monkeypatch)
            first.outbox.close()
            wait_until(lambda: "member 2 does not count" in caplog.text, "for the leader that goes it is let go, too")
            assert not second.leads.is_set()
        second.wait_until_it_leads()
        assert [state for state, _ in second.told].count(StandbyState.LOOKING) == 1
    finally:
        first.end()
        if second is not None:
            second.end()


def test_who_was_granted_the_lead_opens_also_where_a_member_is_let_go_meanwhile(members, caplog):
    """Another process holds a member's directory meanwhile: the granted leader waits for it, because to give up its
    lead would make all wait once more.
    """
    granted = create_outbox(members.data[0], members.addresses, "orders")
    first, second, let_go = Instance(members.data[0]), None, ExitStack()

    def take(state):
        if state is StandbyState.TAKING_OVER:
            let_go.enter_context(handed_over(members.data[2] / str(granted.outbox_id), granted.outbox_id))

    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1], also_tell=take, open_timeout_s=WAIT_S)
        second.wait_for("was in contact")
        members.nodes[0].stop()
        first.outbox.close()
        wait_until(lambda: "until they do, no record is taken" in caplog.text, "it asks again")
        assert not second.leads.is_set()
        let_go.close()
        second.wait_until_it_leads()
        assert [state for state, _ in second.told].count(StandbyState.TAKING_OVER) == 1
    finally:
        let_go.close()
        first.end()
        if second is not None:
            second.end()


def test_why_it_could_not_open_is_told_though_its_probes_find_their_address_taken(members, monkeypatch, caplog):
    """It continues to stand by, without probes until the address is free; else there would be one instance less."""
    opened = Outbox.open
    with ExitStack() as others, reserve() as held:
        address = held.getsockname()

        @wraps(opened)
        def open_outbox(*arguments, **settings):
            if not caplog.text.count("it answers no probes"):
                held.listen()
                raise CommandRefused("the disk is being mounted")
            held.close()
            return opened(*arguments, **settings)

        create_outbox(members.data[0], members.addresses, "orders")
        monkeypatch.setattr(Outbox, "open", open_outbox)
        instance = Instance(members.data[0], health=HealthSettings(listen=f"127.0.0.1:{address[1]}"))
        others.callback(instance.end)
        instance.wait_until_it_leads()
        assert any("the disk is being mounted" in why for _, why in instance.told), instance.told
        assert "it answers no probes" in caplog.text
        with socket.create_connection(address, WAIT_S) as probe:
            probe.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert b" 200 " in probe.recv(100)


def test_each_instance_says_who_leads(members):
    granted = create_outbox(members.data[0], members.addresses, "orders")

    def leader(instance_address):
        with socket.create_connection(instance_address, WAIT_S) as probe:
            probe.sendall(b"GET /leader HTTP/1.0\r\n\r\n")
            head, _, body = b"".join(iter(lambda: probe.recv(1000), b"")).partition(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(body)

    with reserve() as one, reserve() as two:
        places = [held.getsockname() for held in (one, two)]
        first, second = (
            Instance(members.data[index], health=HealthSettings(listen=f"127.0.0.1:{places[index][1]}"))
            for index in (0, 1)
        )
        try:
            first.wait_until_it_leads()
            second.wait_for("was in contact")
            assert leader(places[0]) == (200, {"leads": True, "member": 0, "address": ""})
            address = next(member.address for member in granted.members if member.index == 0)
            assert leader(places[1]) == (503, {"leads": False, "member": 0, "address": address})
        finally:
            first.end()
            second.end()


def test_a_look_that_began_before_another_was_promoted_takes_nothing_from_it(members):
    granted = create_outbox(members.data[0], members.addresses, "orders")
    first, second, promoted = Instance(members.data[0]), None, []
    place = members.data[1] / str(granted.outbox_id)

    def meanwhile(state):
        if state is StandbyState.LOOKING and not promoted:
            promoted.append(promote(members.data[2] / str(granted.outbox_id)))
            # A majority is enough for it: on a busy machine this member has the grant a moment later.
            wait_until(
                lambda: find_election_state(place, REAL_FILESYSTEM)[1].grant.leader == 2,
                "the looking member has the grant",
            )

    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1], also_tell=meanwhile)
        second.wait_for("was in contact")
        first.outbox.close()
        second.wait_for("member 2 leads since epoch")
    finally:
        first.end()
        if second is not None:
            second.end()


@pytest.mark.parametrize("state", [StandbyState.STANDING_BY, StandbyState.LOOKING, StandbyState.TAKING_OVER])
def test_cancelled_in_any_state_it_ends_without_an_outbox_and_the_next_instance_leads(members, state):
    create_outbox(members.data[0], members.addresses, "orders")
    first, second, third, is_there = Instance(members.data[0]), None, None, threading.Event()

    def cancel(reached):
        if reached is state and is_there.wait(WAIT_S):
            second.cancel.set()

    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1], also_tell=cancel)
        is_there.set()
        if state is not StandbyState.STANDING_BY:
            second.wait_for("was in contact")
            first.outbox.close()
        second.thread.join(WAIT_S)
        assert not second.thread.is_alive()
        assert second.outbox is None
        first.outbox.close()
        third = Instance(members.data[1], takeover_pause_ms=0)
        third.wait_until_it_leads()
        assert third.outbox.append(0, b"first").result(WAIT_S) == 0
    finally:
        for one in (first, second, third):
            if one is not None:
                one.end()


LOCK_STEP = """
import os, sys
for line in range(int(os.environ["PUSHREP_LINE"]) + 1, 6):
    print(line, flush=True)
    print(sys.stdin.readline(), end="", file=sys.stderr, flush=True)
"""


def test_a_command_gets_an_answer_for_a_line_that_the_outbox_holds_already(members):
    """After a takeover that lost line 2 of partition 0 and kept line 3 of partition 1."""
    create_outbox(members.data[0], members.addresses, "orders", 2)
    pause = {"takeover_after_ms": TAKEOVER_MS, "takeover_pause_ms": 0}
    with Outbox.stand_by(members.data[0], "orders", 2, "pushrep-run", **outbox_arguments(**pause)) as outbox:
        pid = producer_id(
            application="pushrep-run", stream="orders", source="lines", destination=outbox.identity.outbox_id
        )
        for line in (1, 3):
            outbox.append(1, b"%d" % line, metadata=StreamMetadata(pid, 1, line)).result(WAIT_S)
    options = ["--takeover-after-ms", TAKEOVER_MS, "--takeover-pause-ms", 0]
    command = ["--", sys.executable, "-c", LOCK_STEP]
    arguments = ["outbox", "run", members.data[0], "orders", *map(str, options), *command]
    done = subprocess.run([PUSHREP, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stderr.splitlines() if re.fullmatch(r"\d \d -?\d", line)]
    assert answers == ["2 0 0", "3 1 -1", "4 0 1", "5 1 2"], done.stderr


def call(capfd, *arguments):
    """Run `pushrep outbox hold`; returns (exit code, JSON or the error)."""
    capfd.readouterr()
    code = run(["outbox", "hold", *map(str, arguments), "--json"])
    said = capfd.readouterr()
    return code, json.loads(said.out)["hold"] if code == 0 else said.err


def held_until(collector, granted):
    """The value of the metric."""
    registry = CollectorRegistry()
    registry.register(collector)
    labels = {"outbox": str(granted.outbox_id), "topic": "orders"}
    return registry.get_sample_value("pushrep_takeovers_held_until_timestamp_seconds", labels)


def test_a_hold_keeps_every_standby_away_promote_works_and_the_next_leader_carries_it_until_it_is_ended(
    members, capfd, caplog
):
    """The second standby begins after the hold."""
    granted = create_outbox(members.data[0], members.addresses, "orders")
    first, second = Instance(members.data[0]), Instance(members.data[1])
    instances = [first, second]
    try:
        first.wait_until_it_leads()
        assert "--reason" in call(capfd, members.data[0], "--for", "1h")[1]
        code, held = call(capfd, members.data[0], "--for", "1h", "--reason", "new switches")
        assert (code, held["reason"]) == (0, "new switches")
        assert first.outbox.append(0, b"first").result(WAIT_S) == 0, "it leads on"
        assert first.outbox.status().hold.until_ms == held["until_ms"]
        assert call(capfd, members.data[1], "--show") == (0, held)
        assert held_until(StatusCollector(first.outbox.status), granted) == held["until_ms"] / 1000
        assert held_until(StatusCollector(members.nodes[1].status), granted) == held["until_ms"] / 1000
        assert "takeovers are held for 3600 s: new switches" in caplog.text
        for place in (members.data[0] / str(granted.outbox_id), members.data[1]):
            assert run(["status", str(place)]) == 0
            assert ": new switches" in capfd.readouterr().out
        assert run(["status", str(members.data[1])]) == 0
        leads = f"{granted.outbox_id} (orders): member 0 ({members.addresses[0]}) leads under epoch"
        assert leads in capfd.readouterr().out
        assert run(["status", str(members.data[0])]) == 0
        assert f"{granted.outbox_id} (orders): this member leads" in capfd.readouterr().out
        assert f"({members.addresses[0]}) leads: run this command there" in call(capfd, members.data[1], "--end")[1]
        for node in members.nodes[1:]:
            (shown,) = node.status().as_dict()["leaders"]
            assert (shown["outbox_id"], shown["hold"]["until_ms"]) == (str(granted.outbox_id), held["until_ms"])
        third = Instance(members.data[2])
        instances.append(third)
        first.outbox.close()
        for standby in (second, third):
            standby.wait_for("takeovers are held for")
            assert standby.outbox is None
        for standby in (second, third):
            standby.end()
        promote(members.data[2] / str(granted.outbox_id))
        instances.append(Instance(members.data[2]))
        instances[-1].wait_until_it_leads()
        assert call(capfd, members.data[0], "--show") == (0, held), "the lead is another's, and so is the word"
        instances.append(Instance(members.data[1]))
        instances[-1].wait_for("takeovers are held for")
        assert call(capfd, members.data[2], "--end") == (0, None)
        instances[-2].outbox.close()
        instances[-1].wait_until_it_leads()
        assert instances[-1].outbox.append(0, b"second").result(WAIT_S) == 1
        assert instances[-1].outbox.status().hold is None
        assert held_until(StatusCollector(instances[-1].outbox.status), granted) == 0
    finally:
        for one in instances:
            one.end()


def test_a_hold_that_too_few_keep_is_refused(members, capfd):
    create_outbox(members.data[0], members.addresses, "orders")
    instance = Instance(members.data[0], open_timeout_s=1)
    try:
        instance.wait_until_it_leads()
        for node in members.nodes[1:]:
            node.stop()
        code, why = call(capfd, members.data[0], "--for", "1h", "--reason", "work")
        assert code == 1
        assert "1 of 2 needed members keep the hold, and [1, 2] do not: try again" in why
    finally:
        instance.end()


def test_after_a_takeover_an_instance_that_was_started_since_waits_for_the_pause_too(members, monkeypatch):
    """The first failure after a quiet time is taken over at once."""
    goodbye_only(monkeypatch)
    create_outbox(members.data[0], members.addresses, "orders")
    first, second, instances = Instance(members.data[0]), None, []
    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1], takeover_pause_ms=3_600_000)
        second.wait_for("was in contact")
        first.outbox.close()
        second.wait_until_it_leads()
        takeover = second.outbox.status().takeover
        assert takeover.epoch % 256 == 1
        third = Instance(members.data[2], takeover_pause_ms=3_600_000)
        instances.append(third)
        third.wait_for("member 1 took over lately")
        second.outbox.close()
        instances.append(Instance(members.data[1], takeover_pause_ms=3_600_000))
        instances[-1].wait_until_it_leads()
        assert third.outbox is None
        assert instances[-1].outbox.status().takeover == takeover, "to lead on is no takeover"
    finally:
        for one in (first, second, *instances):
            if one is not None:
                one.end()


def test_a_node_that_allows_nobody_says_so_when_an_outbox_is_made(tmp_path):
    settings = NodeSettings(address=Address("127.0.0.1", 0))
    with ReplicaNode(tmp_path / "data", settings) as node, HandoverSocket(node):
        addresses = [str(node.address), "127.0.0.1:1", "127.0.0.1:2"]
        with pytest.raises(CommandRefused, match=r"its own node refuses it at .*: start every node with --allow"):
            create_outbox(tmp_path / "data", addresses, "orders")


def test_a_second_outbox_of_a_topic_is_made_only_if_that_is_meant(members, capfd):
    """No instance could tell which of the two is its own: a command that is run twice would stop all of them."""
    made = create_outbox(members.data[0], members.addresses, "orders")
    create = ["outbox", "create", str(members.data[0]), "--members", ",".join(members.addresses), "--topic", "orders"]
    assert run(create) == 1
    assert f"is made already: {members.data[0] / str(made.outbox_id)}" in capfd.readouterr().err
    instance = Instance(members.data[0])
    try:
        instance.wait_until_it_leads()
    finally:
        instance.end()
    assert run([*create, "--another"]) == 0
    assert len([path for path in members.data[0].iterdir() if path.is_dir()]) == 2


STOPPED = """
import os, sys
from pushrep.outbox.creating import create_outbox
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.member_clients import MemberClients
MemberClients.offer = lambda *_, **__: os._exit(9)
create_outbox(sys.argv[1], sys.argv[2:], "orders")
"""


def test_an_outbox_whose_making_was_killed_is_made_by_the_first_members_instance(members):
    """The first grant is on one disk only."""
    command = [sys.executable, "-c", STOPPED, str(members.data[0]), *members.addresses]
    assert subprocess.run(command, check=False).returncode == 9
    with pytest.raises(CommandRefused, match="is made already"):
        create_outbox(members.data[0], members.addresses, "orders")
    instances = [Instance(data) for data in members.data]
    try:
        instances[0].wait_until_it_leads()
        assert instances[0].outbox.append(0, b"first").result(WAIT_S) == 0
        for one in instances[1:]:
            one.wait_for("was in contact")
    finally:
        for one in instances:
            one.end()


def test_an_outbox_whose_first_grant_was_given_out_stays(members, monkeypatch):
    """Others may keep it, and would lead an outbox that is gone at its first member."""

    def lost(clients, grant, index, address, **more):
        offer(clients, grant, index, address, **more)
        raise NodeUnreachable(str(address), "its answer is lost")

    offer = MemberClients.offer
    with monkeypatch.context() as patch:
        patch.setattr(MemberClients, "offer", lost)
        with pytest.raises(CommandRefused, match=r"so .* stays: its instance offers it again"):
            create_outbox(members.data[0], members.addresses, "orders", timeout_s=3)
    instance = Instance(members.data[0])
    try:
        instance.wait_until_it_leads()
    finally:
        instance.end()


def test_an_outbox_is_made_only_where_every_member_answers(members):
    members.nodes[2].stop()
    with pytest.raises(CommandRefused, match=r"2 \(127.0.0.1:\d+\) did not"):
        create_outbox(members.data[0], members.addresses, "orders")
    with pytest.raises(CommandRefused, match="another node"):
        create_outbox(members.data[0], members.addresses[1::-1] + members.addresses[2:], "orders")
    assert not [path for path in members.data[0].iterdir() if path.is_dir()]


def test_members_are_not_removed_below_the_number_that_standbys_need(members, capfd):
    create_outbox(members.data[0], members.addresses, "orders")
    first, second = Instance(members.data[0]), None
    try:
        first.wait_until_it_leads()
        second = Instance(members.data[1])
        second.wait_for("was in contact")
        home = first.outbox.directory
        assert run(["replica", "remove", str(home), "2"]) == 1
        errors = capfd.readouterr().err
        assert "2 members would be left, and standbys need 3" in errors
        assert f"pushrep replica add {home} HOST:PORT" in errors
        assert first.outbox.facts.replication.grant.indexes == {0, 1, 2}, "nothing was changed"
        printed = errors.partition("Without standbys: pushrep ")[2].partition(". Nothing")[0]
        assert printed == f"replica remove {home} 2 --no-standbys"
        assert run(printed.split()) == 0
        assert first.outbox.append(0, b"first").result(WAIT_S) == 0
        second.thread.join(WAIT_S)
        assert isinstance(second.failed, CantStandBy)
    finally:
        for one in (first, second):
            if one is not None:
                one.end()


def test_a_removed_members_service_says_so_once_and_stands_by_again_when_it_is_added(tmp_path, capfd, caplog):
    with ExitStack() as stack:
        members = Members(tmp_path, stack, 4)
        create_outbox(members.data[0], members.addresses, "orders")
        instances = [Instance(data) for data in members.data[:1]]
        stack.callback(instances[0].end)
        instances[0].wait_until_it_leads()
        gone = Instance(members.data[3])
        stack.callback(gone.end)
        gone.wait_for("was in contact")
        home = str(instances[0].outbox.directory)
        assert run(["replica", "remove", home, "3"]) == 0
        gone.wait_for("member 3 was removed")
        told = len(gone.told)
        logged = caplog.text.count("data-3")
        assert not gone.leads.wait(2), "it looks no more"
        assert len(gone.told) == told
        assert caplog.text.count("data-3") == logged
        assert run(["replica", "add", home, members.addresses[3]]) == 0
        wait_until(lambda: any("was in contact" in why for _, why in gone.told[told:]), "it stands by again")
