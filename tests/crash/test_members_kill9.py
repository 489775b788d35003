"""kill -9 at each step of a change of members: of the service, of a member that stays, of who comes or goes.

Contract, "Members, grants, epochs": a new list takes effect only when enough members of both lists stored it, so a
change that was cut short anywhere is finished or undone by who asks again; nothing acknowledged with ALL is lost, and
who was removed counts no more.
"""

import os
import signal
from shutil import copyfile, copytree, rmtree
from typing import NamedTuple

import pytest

from pushrep import SegmentLog
from pushrep.outbox.promotion import promote
from tests.crash.members_world import DIRECTORY, WAIT_S, Kill, Point, World
from tests.integration.certificates import trial_certificates

STEPS_MAX = 60
SERVICE, OPENING = "service", "service, when it is opened with the new members"
VICTIMS = (SERVICE, OPENING, "stays", "goes", "comes")


class Change(NamedTuple):
    """The nodes that are members before, what is asked for, the members and their nodes after."""

    before: list[str]
    calls: list[tuple[str, str | int]]
    members: list[int]
    after: list[str]


CHANGES = {
    "add": Change(["stays"], [("add", "comes")], [0, 1, 2], ["stays", "comes"]),
    "add, then undone": Change(["stays"], [("add", "comes"), ("remove", 2)], [0, 1], ["stays"]),
    "remove": Change(["stays", "goes"], [("remove", 2)], [0, 1], ["stays"]),
    "replace": Change(["stays", "goes"], [("add", "comes"), ("remove", 2)], [0, 1, 3], ["stays", "comes"]),
}


PROMISES, EPOCHS, EPOCHS_CRC = "promises.json", "leader-epoch-checkpoint", "leader-epoch-checkpoint.crc32c"


class Row(NamedTuple):
    """A step that comes in every run, and the file that is about to be another then."""

    change: str
    victim: str
    step: int
    point: Point
    file: str


TABLE = [
    # a service stores its next number, the joint grant, that its epoch begins; then the same of the new list
    Row("add", SERVICE, 1, Point.TORN, PROMISES),
    Row("add", SERVICE, 2, Point.AFTER, PROMISES),
    Row("replace", SERVICE, 4, Point.BEFORE, EPOCHS),
    Row("remove", SERVICE, 6, Point.BEFORE, PROMISES),
    Row("add, then undone", SERVICE, 7, Point.AFTER, EPOCHS_CRC),
    # a node stores the joint grant before it answers; one that comes makes its directory, then keeps the first grant
    Row("remove", "stays", 1, Point.AFTER, PROMISES),
    Row("remove", "goes", 1, Point.BEFORE, PROMISES),
    Row("add", "comes", 1, Point.AFTER, DIRECTORY),
    Row("replace", "comes", 2, Point.TORN, PROMISES),
    # the service's own file gets the new members when it is opened with them
    Row("add", OPENING, 1, Point.BEFORE, "outbox.json"),
]


@pytest.fixture
def new_world(tmp_path):
    made = []

    def make(tls=None):
        made.append(World(tmp_path / str(len(made)), tls))
        return made[-1]

    yield make
    for world in made:
        world.close()


def run_killed(world, name, victim, kill):
    """The change with a kill on its way; what was about to be replaced when it came, None if it never did."""
    change = CHANGES[name]
    for node in dict.fromkeys([*change.before, *(given for _, given in change.calls if isinstance(given, str))]):
        world.serve(node)
    assert world.lead(change.before)
    world.append()
    world.wait_for_all([])  # nobody has steps of its own left
    world.leader.ask("produce")
    if victim != OPENING:
        (world.leader if victim == SERVICE else world.nodes[victim]).ask("arm", kill.step, kill.point.value)
    for word, given in change.calls:
        ask_until_done(world, change, victim, word, world.addresses.get(given, given))
    if victim == OPENING:
        world.leader.end()
        assert world.lead(change.after, kill) or world.leader.code == -signal.SIGKILL
        assert world.leader.code is None or world.lead(change.after)
        world.leader.ask("produce")
    check(world, change, victim)
    found = world.told.read_text() if world.told.exists() else None
    world.close()
    return found


def ask_until_done(world, change, victim, *call):
    """Repeat a command until it is done. A process that is killed meanwhile is started again, and the command is sent
    again to a new service.
    """
    world.leader.tell(*call)
    while not world.revive([victim], WAIT_S) or world.leader.hear() is None:
        if world.leader.code is not None:
            assert world.leader.code == -signal.SIGKILL
            assert world.lead(change.before)
            world.leader.ask("produce")
            world.leader.tell(*call)


def check(world, change, victim):
    """Check that the members are the wanted ones, hold what was acknowledged, and that no other member counts."""
    world.leader.ask("rest")
    world.wait_for_members(change.members)
    world.wait_for_all([victim])  # its step may come as late as this
    for node in change.after:
        world.nodes[node].end()
    assert world.leader.ask("append")[0] == "refused", "nobody is left but a node that is no member"
    for node in change.after:
        world.serve(node)
    world.wait_for_all([])
    world.append()
    world.wait_for_all([])
    acked = world.acked()
    for name in ("outbox", *change.after):
        held = world.held(name)
        assert {offset: held.get(offset) for offset in acked} == acked, name


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_members_outlives_a_kill_at_each_step(new_world, torture, name):
    """The short form takes the table's steps, the long one all of everybody's, until one never comes."""
    change, draw = CHANGES[name], torture.random(name)
    for row in TABLE:
        if row.change == name:
            found = run_killed(new_world(), name, row.victim, Kill(row.step, row.point))
            assert found == row.file or row.victim == "goes", row  # which need not hear of it before all is over
    for victim in {SERVICE, OPENING, *change.before, *(given for _, given in change.calls)} & set(VICTIMS):
        found, step = [], 0
        while torture.is_long and None not in found:
            step += 1
            assert step < STEPS_MAX, f"{victim} never gets to its end: {found}"
            found.append(run_killed(new_world(), name, victim, Kill(step, draw.choice(list(Point)))))
        assert not torture.is_long or PROMISES in found or victim == "goes", f"{victim}: {found}"


class Chaos:
    """The members of an outbox, over mutual TLS, while its service takes records: one trouble after the other."""

    def __init__(self, world, draw):
        self.world, self.draw = world, draw
        self.indexes, self.backups, self.met = {"a": 1, "b": 2}, {}, []
        self.renew()
        for name in "abc":
            world.serve(name)
        assert world.lead(["a", "b"])
        world.append()
        world.wait_for_all([])
        world.leader.ask("produce")

    def run(self, kinds):
        for kind in kinds:
            self.met.append(kind)
            getattr(self, kind)(self.draw.choice(sorted(self.indexes)))
            self.world.wait_for_all([])
        self.world.leader.ask("rest")
        self.world.append()
        self.world.wait_for_all([])
        acked = self.world.acked()
        self.world.wait_for_members([0, *sorted(self.indexes.values())])
        for name in ("outbox", *self.indexes):
            held = self.world.held(name)
            assert {offset: held.get(offset) for offset in acked} == acked, (name, self.met)

    def renew(self, _=None):
        """Certificates of all under the same authority; who is started from now on shows a new one."""
        trial_certificates(self.world.tls, ("127.0.0.1", "billing"))

    def rotate(self, name):
        """Replace the CA: first both are trusted, then certificates of the new one are used, then the old one is not
        trusted any more. Running processes read the files again; one member is restarted meanwhile.
        """
        tls, coming = self.world.tls, self.world.tls / "next"
        rmtree(coming, ignore_errors=True)
        trial_certificates(coming, ("127.0.0.1", "billing"))
        old, new = (tls / "ca.pem").read_bytes(), (coming / "ca.pem").read_bytes()
        for authority, files in (
            (new + old, ()),
            (new + old, ("127.0.0.1.pem", "127.0.0.1.key", "billing.pem", "billing.key")),
            (new, ("ca.key",)),
        ):
            (tls / "ca.pem").write_bytes(authority)
            for file in files:
                copyfile(coming / file, tls / file)
            for child in (*self.world.nodes.values(), self.world.leader):
                child.ask("reload")
            if files:
                self.kill(name)
            self.world.append()

    def slow(self, name):
        """A disk that takes 20 ms for each sync, until the node is started again."""
        self.world.nodes[name].end()
        self.world.serve(name, 0.02)

    def jump(self, name):
        """Set the wall clocks forward by years, and back."""
        for child in (self.world.nodes[name], self.world.leader):
            child.ask("jump", self.draw.choice((-1, 1)) * self.draw.choice((1_000, 3_600_000, 1 << 37)))

    def suspend(self, name):
        """Stop the processes of a machine (SIGSTOP) while the others run, then continue them."""
        os.kill(self.world.nodes[name].pid, signal.SIGSTOP)
        for _ in range(3):
            self.world.leader.ask("append")
        os.kill(self.world.nodes[name].pid, signal.SIGCONT)

    def kill(self, name):
        self.world.nodes[name].end()
        self.world.serve(name)

    def kill_the_service(self, _):
        self.world.leader.end()
        assert self.world.lead(sorted(self.indexes))
        self.world.leader.ask("produce")

    def wipe(self, name):
        """An empty disk under the old address."""
        self.world.nodes[name].end()
        rmtree(self.world.root / name)
        self.world.serve(name)

    def lose_a_log(self, name):
        """Delete the directory of a log. The files beside it still have how far it was acknowledged."""
        self.world.nodes[name].end()
        (log,) = (self.world.root / name).glob("*/orders-0")
        rmtree(log)
        self.world.serve(name)

    def restore(self, name):
        """An older copy of the disk under the old address."""
        root = self.world.root
        if name not in self.backups:
            self.world.nodes[name].end()
            self.backups[name] = copytree(root / name, root / f"backup of {name} as {self.indexes[name]}")
            self.world.serve(name)
            self.world.append()
            self.world.wait_for_all([])
        self.world.nodes[name].end()
        rmtree(root / name)
        copytree(self.backups[name], root / name)
        self.world.serve(name)

    def move(self, name):
        """The same directory at another address: it leaves the list, and comes in as another member."""
        self.world.nodes[name].end()
        del self.world.addresses[name]
        self.world.serve(name)
        self.ask("remove", self.indexes[name])
        self.indexes[name] = self.ask("add", self.world.addresses[name])
        self.backups.pop(name, None)

    def replace(self, name):
        """Replace a member by a node that is no member, with a kill of any process in between."""
        (coming,) = {"a", "b", "c"} - self.indexes.keys()
        victim = self.draw.choice(sorted({"a", "b", "c"} - {name}))
        self.world.nodes[victim].ask("arm", self.draw.randint(1, 6), self.draw.choice(list(Point)).value)
        added = self.ask("add", self.world.addresses[coming])
        self.ask("remove", self.indexes.pop(name))
        self.indexes[coming] = added
        self.world.revive("abc")
        self.world.nodes[victim].end()  # its step may not have come
        self.world.serve(victim)

    def ask(self, *call):
        """The member that it was about; nodes that die meanwhile are started again."""
        self.world.leader.tell(*call)
        while not self.world.revive("abc", WAIT_S):
            pass
        return self.world.leader.hear()[0]


KINDS = (
    "renew", "rotate", "kill", "kill_the_service", "wipe", "lose_a_log", "restore", "move", "replace", "slow", "jump",
    "suspend",
)  # fmt: skip


def test_what_was_acknowledged_survives_changes_of_members_disks_addresses_and_certificates(
    new_world, torture, tmp_path
):
    """Each kind of fault once, in an order of the seed; the long form repeats them. `rotate` renews certificates,
    too.
    """
    draw = torture.random()
    chaos = Chaos(new_world(tmp_path / "tls"), draw)
    chaos.run([*draw.sample(KINDS[1:], len(KINDS) - 1), *draw.choices(KINDS, k=torture.count(0, 200))])


SET_ASIDE = [
    Kill(3, Point.AFTER),  # the grant of the new generation is kept, the logs lie there still
    Kill(4, Point.BEFORE),  # they are set aside, which is not kept yet
    Kill(1, Point.AFTER),  # their new place is made
    Kill(2, Point.TORN),  # what was promised while they counted is copied there
    Kill(3, Point.BEFORE),
    Kill(4, Point.AFTER),
]


def test_logs_of_an_older_generation_are_set_aside_whole_through_a_kill(new_world, torture):
    """identity M6: members that were only unreachable reconnect after the others were forced to continue without
    them.
    """
    for kill in SET_ASIDE if torture.is_long else SET_ASIDE[:2]:
        come_back_killed(new_world(), kill)


def come_back_killed(world, kill):
    for node in ("stays", "goes"):
        world.serve(node)
    assert world.lead(["stays", "goes"])
    world.append()
    world.wait_for_all([])
    before = world.held("goes")
    world.leader.end()
    for node in ("stays", "goes"):
        world.nodes[node].end()
    done = promote(world.root / "outbox", accept_loss=True, depose=True, timeout_s=1)
    assert done.granted.unreached == (1, 2)
    for node in ("stays", "goes"):
        world.serve(node)
    world.nodes["goes"].ask("arm", kill.step, kill.point.value)
    assert world.lead(["stays", "goes"])
    world.leader.ask("produce")
    world.wait_for_all(["goes"])
    world.leader.ask("rest")
    assert world.told.read_text() in {PROMISES, DIRECTORY}
    world.append()
    world.wait_for_all([])
    acked = world.acked()
    for name in ("outbox", "stays", "goes"):
        held = world.held(name)
        assert {offset: held.get(offset) for offset in acked} == acked, name
    (aside,) = world.root.glob("goes/*/generation-0.stale")
    SegmentLog.open(aside / "orders-0").close()  # it was not closed: whoever reads it lets it recover first
    with SegmentLog.open_reader(aside / "orders-0", isolation="written") as reader:
        assert {record.offset: record.value.decode() for record in reader.records(0)} == before
    world.close()
