"""A directory that goes from a node to a promotion and back, and from a service to a node: what is asked, what is
refused, what is on disk.
"""

import errno
import os
import socket
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.errors import BadArgument
from pushrep.log.directory_files import DirectoryLock
from pushrep.outbox import directory_handover
from pushrep.outbox.control import ControlServer
from pushrep.outbox.directory_handover import NOT_MADE, HandoverSocket, adopt, handed_over
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import new_identity, read_identity, write_identity
from pushrep.replicate.election_state import ElectionState, write_election_state
from pushrep.replicate.node_store import LastContact, StandbyContact


class Disk(RealFilesystem):
    """Notes renames and directory syncs. trouble: what a rename into another directory raises."""

    def __init__(self):
        super().__init__()
        self.done, self.trouble = [], None

    def rename(self, source, target):
        if self.trouble is not None and source.parent != target.parent:
            raise self.trouble
        super().rename(source, target)
        self.done.append(f"{source.name} -> {target.parent.name}")

    def sync_directory(self, directory):
        super().sync_directory(directory)
        self.done.append(f"sync {directory.name}")


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(directory_handover, "REAL_FILESYSTEM", disk)
    return disk


@pytest.fixture
def service(tmp_path):
    """The directory of an outbox whose lead another member may have."""
    directory = tmp_path / "services" / "orders"
    directory.mkdir(parents=True)
    identity = new_identity(producer="p", topic="orders", partitions=1, carrier="key", replicas=["127.0.0.1:1"])
    write_identity(REAL_FILESYSTEM, directory, identity)
    write_election_state(directory, UUID(identity.outbox_id), ElectionState(member=0), REAL_FILESYSTEM)
    return directory


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_an_outbox_that_is_adopted_has_its_new_name_on_disk_and_no_more_the_old_one(service, disk, tmp_path, through):
    outbox_id, given = read_identity(REAL_FILESYSTEM, service).outbox_id, service
    if through == "a link":
        (tmp_path / "link").mkdir()
        given = tmp_path / "link" / "orders"
        given.symlink_to(service)
    assert adopt(tmp_path / "node" / "data", given) == tmp_path / "node" / "data" / outbox_id
    assert read_identity(REAL_FILESYSTEM, tmp_path / "node" / "data" / outbox_id).outbox_id == outbox_id
    assert not service.exists()
    assert disk.done[-3:] == ["orders -> data", "sync data", "sync services"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda service, _: (service / "outbox.json").unlink(), "there is no outbox in it"),
        (lambda service, _: (service / "promises.json").unlink(), "it never had replicas, so no other member leads it"),
        (lambda _, target: target.mkdir(parents=True), "is there already: the node began a copy. Stop it, and"),
        (lambda _, target: (target.parent.mkdir(), target.symlink_to("none")), "is there already: the node began a"),
    ],
)
def test_what_no_node_can_take_is_refused_and_stays_as_it_was(service, disk, tmp_path, change, why):
    change(service, tmp_path / "data" / read_identity(REAL_FILESYSTEM, service).outbox_id)
    with pytest.raises(CommandRefused, match=f"can't be adopted: .*{why}"):
        adopt(tmp_path / "data", service)
    assert service.is_dir()
    assert disk.done == []


def test_an_outbox_that_is_open_is_not_adopted(service, disk, tmp_path):
    lock = DirectoryLock(service, REAL_FILESYSTEM)
    try:
        with pytest.raises(CommandRefused, match=f"process {os.getpid()} has it open: end its service"):
            adopt(tmp_path / "data", service)
    finally:
        lock.close()
    assert disk.done == []
    assert adopt(tmp_path / "data", service).is_dir()


def test_a_directory_on_another_disk_is_to_be_moved_whole_and_other_troubles_are_the_disks(service, disk, tmp_path):
    disk.trouble = OSError(errno.EXDEV, "Invalid cross-device link")
    with pytest.raises(CommandRefused, match=f"{tmp_path / 'data'} is on another disk: move the whole directory to"):
        adopt(tmp_path / "data", service)
    disk.trouble = OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError, match="full") as raised:
        adopt(tmp_path / "data", service)
    assert raised.value is disk.trouble
    assert service.is_dir()


class Node:
    """Of a node, what its control socket asks."""

    def __init__(self, directory):
        self.directory, self.told, self.closed, self.fit = directory, [], [], []
        self.store, self.copies = self, SimpleNamespace(state=self.copy, end=self.copy)
        self.standby_contact = StandbyContact(700, is_successor=True)

    @contextmanager
    def hand_over(self, outbox_id):
        self.closed.append(outbox_id)
        yield LastContact(5)
        self.closed.remove(outbox_id)

    def note_standby(self, *given):
        (self.told if given else self.fit).append(given)

    def look_up(self, outbox_id):
        assert outbox_id == UUID(int=1)
        return self

    def copy(self, recording_id):
        return LastContact(recording_id)

    def stop_replay(self, session_id, by):
        self.told.append((session_id, by))
        return session_id == 4


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def peer(node, monkeypatch):
    """A peer of the node's control socket; `peer.ask(call, arguments)`."""
    monkeypatch.setattr(ControlServer, "__init__", lambda _self, directory, calls: given.append((directory, calls)))
    given = []
    HandoverSocket(node)
    ((directory, calls),) = given
    assert directory == node.directory
    near, far = socket.socketpair()
    with near, far, ExitStack() as held:
        near.settimeout(30)
        peer = SimpleNamespace(connection=near, held=held)
        peer.ask = lambda call, arguments: calls(peer)[call](arguments)
        yield peer


def test_a_promotion_keeps_the_directory_for_as_long_as_it_holds_its_connection(node, peer):
    """A promotion fetches what it lacks, which takes as long as it takes."""
    assert peer.ask("hand-over", {"outbox_id": str(UUID(int=1))}) == LastContact(5)
    assert node.closed == [UUID(int=1)]
    assert peer.connection.gettimeout() is None
    peer.held.close()
    assert node.closed == []


@pytest.mark.parametrize(
    ("arguments", "answer", "told", "fit"),
    [
        ({"is_fit": True, "state": "standing_by", "why": "w"}, (700, True), [(UUID(int=1), "standing_by", "w")], [()]),
        ({"is_fit": False, "state": "waiting", "why": ""}, (700, True), [(UUID(int=1), "waiting", "")], []),
        ({}, (700, True), [], []),
        ({"state": "waiting"}, (700, True), [], []),
        ({"state": 7, "why": "w"}, (700, True), [], []),
        ({"outbox_id": str(NOT_MADE), "is_fit": True, "state": "waiting", "why": "w"}, (None, False),
         [(NOT_MADE, "waiting", "w")], []),
    ],
)  # fmt: skip
def test_a_standby_tells_its_state_and_counts_once_it_could_lead(node, peer, arguments, answer, told, fit):
    assert peer.ask("contact", {"outbox_id": str(UUID(int=1)), **arguments}) == answer
    assert (node.told, node.fit) == (told, fit)


@pytest.mark.parametrize("outbox_id", [None, "", "orders", 7])
@pytest.mark.parametrize("call", ["hand-over", "contact"])
def test_what_is_no_outboxs_id_is_refused(node, peer, call, outbox_id):
    with pytest.raises(BadArgument, match="outbox_id: give the id of an outbox"):
        peer.ask(call, {"outbox_id": outbox_id})
    assert (node.closed, node.told, peer.connection.gettimeout()) == ([], [], 30)


def test_a_replay_is_stopped_with_the_name_of_who_asked(node, peer):
    assert [peer.ask("stop-replay", {"session_id": n}) for n in (4, 5)] == [{"stopped": True}, {"stopped": False}]
    assert node.told == [(n, f"process {os.getpid()} of user {os.getuid()}") for n in (4, 5)]
    for wrong in (-1, 1 << 63, None, True, "4"):
        with pytest.raises(BadArgument, match="session_id"):
            peer.ask("stop-replay", {"session_id": wrong})
    assert len(node.told) == 2


def test_where_no_node_runs_the_directory_is_free_and_the_last_contact_unknown(tmp_path):
    with handed_over(tmp_path / "data" / str(UUID(int=1)), UUID(int=1)) as contact:
        assert contact == LastContact()
