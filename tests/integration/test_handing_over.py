"""A leader hands the lead over: by `pushrep outbox transfer`, and when it is closed. Nobody waits for T."""

import errno
import json
import threading
from contextlib import ExitStack
from time import monotonic

import pytest

from pushrep.cli.main import run
from pushrep.election.errors import NotLeader
from pushrep.election.leader import PartitionLeader
from pushrep.env.filesystem import RealFile
from pushrep.outbox import DeliveryFailed, StandbyState
from pushrep.outbox.creating import create_outbox
from tests.integration.outboxes import wait_until
from tests.integration.test_standbys import WAIT_S, Instance, Members

LONG_MS = 3_600_000
"""No standby takes over by itself within the test."""


class Service:
    """An instance on each of three members; the first one leads, the others stand by."""

    def __init__(self, root, stack):
        self.members = Members(root, stack)
        self.data = self.members.data
        create_outbox(self.data[0], self.members.addresses, "orders")
        self.instances, self.stack = {}, stack
        self.start(0).wait_until_it_leads()
        for index in (1, 2):
            self.start(index).wait_for("was in contact")
        assert self.outbox(0).append(0, b"first").result(WAIT_S) == 0
        self.wait_for_standbys(0, {1, 2})

    def start(self, index, **settings):
        settings = {"takeover_after_ms": LONG_MS, "takeover_pause_ms": LONG_MS, "close_timeout_s": 5, **settings}
        self.instances[index] = instance = Instance(self.data[index], **settings)
        self.stack.callback(instance.end)
        return instance

    def outbox(self, index):
        return self.instances[index].outbox

    def wait_for_standbys(self, leader, standbys):
        """Until the leader knows of these."""
        wait_until(lambda: self.outbox(leader).facts.replication.leading.standbys == standbys, "it knows who stands by")


@pytest.fixture
def service(tmp_path):
    with ExitStack() as stack:
        yield Service(tmp_path, stack)


def transfer(service, capfd, *options):
    capfd.readouterr()
    code = run(["outbox", "transfer", str(service.data[0]), *map(str, options)])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_the_named_member_takes_over_at_once_and_it_is_no_takeover(service, capfd):
    """The others would wait for an hour, and after a takeover for another."""
    assert transfer(service, capfd, "--to", 2) == (0, "member 2 takes over\n", "")
    service.instances[2].wait_until_it_leads()
    with pytest.raises(NotLeader, match=r"member 0 handed its lead of epoch \d+ over to member 2"):
        service.outbox(0).append(0, b"late")
    assert service.outbox(2).append(0, b"second").result(WAIT_S) == 1
    assert service.outbox(2).status().takeover is None
    assert service.instances[0].deposed.wait(WAIT_S)
    service.instances[0].end()
    again = service.start(0)
    again.wait_for("was in contact")
    assert not service.instances[1].leads.is_set()
    service.wait_for_standbys(2, {0, 1})
    service.outbox(2).close()
    wait_until(lambda: again.leads.is_set() or service.instances[1].leads.is_set(), "one that stood by goes on")


def test_records_that_wait_are_acknowledged_before_the_lead_is_handed_over(service, capfd):
    stop, offsets, refused = threading.Event(), [], []

    def produce():
        while not stop.is_set() and not refused:
            try:
                offsets.append(service.outbox(0).append(0, b"more").result(WAIT_S))
            except Exception as error:  # noqa: BLE001 - looked at below
                refused.append(error.__cause__ or error)

    producing = threading.Thread(target=produce)
    producing.start()
    try:
        wait_until(lambda: len(offsets) > 20, "it produces")
        assert transfer(service, capfd, "--json")[0] == 0
        wait_until(lambda: refused, "it takes no more")
    finally:
        stop.set()
        producing.join(WAIT_S)
    assert isinstance(refused[0], NotLeader)
    wait_until(lambda: any(service.instances[index].leads.is_set() for index in (1, 2)), "one takes over")
    leader = next(index for index in (1, 2) if service.instances[index].leads.is_set())
    assert service.outbox(leader).append(0, b"next").result(WAIT_S) == offsets[-1] + 1, "what failed is not in the log"


def test_a_leader_that_is_closed_hands_over_to_a_standby(service):
    service.outbox(0).close()
    wait_until(lambda: any(service.instances[index].leads.is_set() for index in (1, 2)), "one takes over")
    leader = next(index for index in (1, 2) if service.instances[index].leads.is_set())
    assert service.outbox(leader).append(0, b"second").result(WAIT_S) == 1
    assert service.outbox(leader).status().takeover is None
    assert StandbyState.DEPOSED not in [state for state, _ in service.instances[0].told], "it was closed, not deposed"


def test_what_can_not_be_handed_over_is_refused_and_the_leader_leads_on(service, capfd, monkeypatch):
    for to in (0, 7):
        code, _, errors = transfer(service, capfd, "--to", to)
        assert (code, f"no service that could lead stands by at {to}: see pushrep status " in errors) == (1, True)
        assert "This one leads on" in errors
    service.instances[1].end()
    service.wait_for_standbys(0, {2})
    assert "stands by at 1" in transfer(service, capfd, "--to", 1)[2]
    assert run(["status", errors.partition("see pushrep status ")[2].partition(". This")[0]]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(PartitionLeader, "has_all", lambda *_: False)
        code, _, errors = transfer(service, capfd, "--to", 2)
        assert (code, "member 2 does not hold everything within 5 s: this one leads on" in errors) == (1, True)
    assert service.outbox(0).append(0, b"second").result(WAIT_S) == 1
    assert run(["outbox", "hold", str(service.data[0]), "--for", "1h", "--reason", "switches"]) == 0
    service.wait_for_standbys(0, {2})
    code, _, errors = transfer(service, capfd)
    assert (code, "takeovers are held (switches)" in errors) == (1, True)
    command = errors.partition("end that first with pushrep ")[2].split()
    assert run(command) == 0
    service.wait_for_standbys(0, {2})
    code, output, _ = transfer(service, capfd, "--json")
    assert (code, json.loads(output)) == (0, {"member": 2})
    service.instances[2].wait_until_it_leads()
    code, _, errors = transfer(service, capfd)
    assert code == 1, "it leads no more"


def test_a_leader_that_can_acknowledge_nothing_more_closes_without_waiting_for_that(service, monkeypatch):
    """Its own disk fails: no standby could ever hold everything that it has acknowledged, and they look at once."""
    sync, leader = RealFile.sync, service.outbox(0)

    def failing(file):
        if service.data[0] in file.path.parents and file.path.suffix == ".log":
            raise OSError(errno.EIO, "the disk is gone")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "sync", failing)
        with pytest.raises(DeliveryFailed):
            leader.append(0, b"second").result(WAIT_S)
        began_s = monotonic()
        leader.close()
        assert monotonic() - began_s < 4, "close_timeout_s is 5"
    wait_until(lambda: any(service.instances[index].leads.is_set() for index in (1, 2)), "another leads")
