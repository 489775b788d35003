"""A leader that can't do its work gives the lead up in time, and says so; another one that can has it then."""

import threading
from contextlib import ExitStack

import pytest

from pushrep import LogConfig, Outbox, ReplicaNode
from pushrep.election.errors import LeadGivenUp
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import StandbyState
from pushrep.outbox.creating import create_outbox
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.outbox.errors import CantCreate
from pushrep.outbox.status import LeadingState
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.sockets import Address

WAIT_S = 60
TAKEOVER_MS = 2_000


class Members:
    """Three nodes in this process, each with its directory."""

    def __init__(self, root, stack):
        settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
        self.data = [root / f"data-{index}" for index in range(3)]
        self.nodes = [stack.enter_context(ReplicaNode(data, settings)) for data in self.data]
        for node in self.nodes:
            stack.enter_context(HandoverSocket(node))
        self.addresses = [str(node.address) for node in self.nodes]


class Instance:
    """Of the service: stands by in a thread until it leads."""

    def __init__(self, data):
        self.told, self.cancel, self.leads, self.deposed = [], threading.Event(), threading.Event(), threading.Event()
        self.outbox = None
        self.thread = threading.Thread(target=self.run, args=(data,))
        self.thread.start()

    def run(self, data):
        settings = {"takeover_after_ms": TAKEOVER_MS, "log_config": LogConfig(preallocate_bytes=0)}
        self.outbox = Outbox.stand_by(data, "orders", 1, "billing", on_state=self.tell, cancel=self.cancel, **settings)
        self.leads.set()

    def tell(self, state, why):
        self.told.append((state, why))
        if state is StandbyState.DEPOSED:
            self.deposed.set()

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
    create_outbox(members.data[0], members.addresses, "orders")
    instance = Instance(members.data[0])
    try:
        instance.wait_until_it_leads()
        assert instance.outbox.append(0, b"first").result(WAIT_S) == 0
        assert not instance.deposed.wait(1.25 * TAKEOVER_MS / 1000), "an idle one whose members answer leads on"
        for node in members.nodes[1:]:
            node.stop()
        assert instance.deposed.wait(WAIT_S)
        assert "members [1, 2] did not answer" in instance.told[-1][1]
        with pytest.raises(LeadGivenUp, match="no majority"):
            instance.outbox.append(0, b"second")
        status = instance.outbox.status()
        assert status.state is LeadingState.RESIGNED
        assert "not_leading" in {one.problem for one in status.problems()}
    finally:
        instance.end()


def test_with_a_full_disk_it_resigns_and_one_with_room_takes_over(members, monkeypatch):
    """Its members hear that it has gone, so that nobody waits for `takeover_after_ms` once more."""
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


def test_an_outbox_is_made_only_where_every_member_answers(members):
    members.nodes[2].stop()
    with pytest.raises(CantCreate, match=r"2 \(127.0.0.1:\d+\) did not"):
        create_outbox(members.data[0], members.addresses, "orders")
    with pytest.raises(CantCreate, match="another node"):
        create_outbox(members.data[0], members.addresses[1::-1] + members.addresses[2:], "orders")
    assert not [path for path in members.data[0].iterdir() if path.is_dir()]
