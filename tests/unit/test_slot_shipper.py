"""What a dead worker left in its slot is shipped by one that lives, until somebody wants the slot.

The topic is a stand-in, as brokers take seconds: tests/kafka/test_shipping_slots.py has real ones.
"""

import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pushrep import Outbox
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.kafka.errors import ShippingStopped, ShippingTimeout
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, write_progress
from pushrep.log import LogLocked
from pushrep.log.directory import LogDirectory
from pushrep.outbox import slots
from pushrep.outbox.control import ControlServer
from pushrep.outbox.slots import SlotShipper, give_up, take_back
from tests.unit.gated_disk import until

LOOKS = 4  # so often nothing came of it


class Topic:
    """Takes everything, or nothing; or a partition of it is stopped."""

    def __init__(self):
        self.trouble_now, self.looks, self.stops = None, 0, []
        self.takes = threading.Event()

    @property
    def trouble(self):
        self.looks += 1
        return self.trouble_now


class World:
    """A worker's own slot, one that another left with a record, and what is opened."""

    def __init__(self, directory):
        self.topic, self.opened, self.closed, self.fails = Topic(), [], [], {}
        self.asked, self.moves = 0, True
        self.own = Outbox.open_slot(directory, "orders", 1, "billing", 3)
        self.left: Path = directory / "slot-1"
        self.leave(self.left)

    @staticmethod
    def leave(slot):
        with Outbox.open(slot, "orders", 1, "billing") as outbox:
            outbox.append(0, b"left").result(60)

    def facts(self):
        return self.own.facts._replace(shipping=SimpleNamespace(sink=SimpleNamespace(state=self.topic)))

    def all_is_shipped(self):
        write_progress(
            REAL_FILESYSTEM, self.left, {"orders": ShippingProgress(partitions={0: PartitionProgress(1, 1, 1)})}
        )

    @contextmanager
    def open_slot(self, path):
        self.opened.append(path)
        if path in self.fails:
            raise self.fails[path]
        with Outbox.open(path, "orders", 1, "billing"):
            yield SimpleNamespace(wait_shipped=self.wait_shipped, facts=SimpleNamespace(shipping=self))
        self.closed.append(path)

    def wait_shipped(self, timeout):
        if self.topic.stops:
            raise self.topic.stops.pop()
        if not self.topic.takes.wait(timeout):
            raise ShippingTimeout(timeout, 1, None)
        self.all_is_shipped()

    def lag(self):
        self.asked += self.moves
        stopped = ShippingStopped(0, 7, "it is too large")
        return {"kafka:orders": SimpleNamespace(records=self.asked, trouble=None, stopped=(stopped,))}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "LOOK_S", 0.002)
    world = World(tmp_path)
    yield world
    world.own.close()


@pytest.fixture
def ship(world):
    shippers = []

    def begin():
        shippers.append(SlotShipper(world.facts(), "orders", world.open_slot))
        return shippers[-1]

    yield begin
    for one in shippers:
        one.close()


def looked_for_nothing(world):
    seen = world.topic.looks
    until(lambda: world.topic.looks >= seen + LOOKS, "it looks again and again")


def test_what_is_left_is_shipped_and_the_slot_is_closed_again(world, ship):
    world.topic.takes.set()
    ship()
    until(lambda: world.closed == [world.left], "all of it is shipped")
    looked_for_nothing(world)
    assert world.opened == [world.left], "nothing is left"
    assert not give_up(world.left)


@pytest.mark.parametrize("why", ["somebody has it", "all is shipped", "no broker answers"])
def test_a_slot_is_left_alone(world, ship, why):
    holder = Outbox.open(world.left, "orders", 1, "billing") if why == "somebody has it" else None
    if why == "all is shipped":
        world.all_is_shipped()
    elif why == "no broker answers":
        world.topic.trouble_now = why
    ship()
    looked_for_nothing(world)
    assert world.opened == []
    if holder is not None:
        holder.close()


def test_a_slot_that_somebody_wants_is_given_up(world, ship):
    assert not give_up(world.left)
    ship()
    until(lambda: give_up(world.left), "it is shipped for others")
    until(lambda: world.closed, "it is closed")
    assert not give_up(world.own.directory), "its own"


def test_a_worker_that_ends_gives_up_what_it_ships_and_begins_with_no_other(world, ship):
    world.leave(world.own.directory.with_name("slot-2"))
    shipper = ship()
    until(lambda: world.opened, "it is shipped for others")
    shipper.close()
    assert world.closed == world.opened == [world.left]
    assert not give_up(world.left)


def test_a_slot_that_can_t_be_opened_is_left_for_a_while_and_one_that_another_took_is_not(world, ship):
    world.leave(taken := world.own.directory.with_name("slot-2"))
    world.fails = {world.left: OSError("its disk is gone"), taken: LogLocked(taken, None, is_own=False)}
    ship()
    until(lambda: world.opened.count(taken) >= LOOKS, "it looks again at once")
    assert world.opened.count(world.left) == 1


def test_a_partition_that_stops_does_not_end_the_shipping_of_the_others(world, ship):
    world.topic.stops = [ShippingStopped(0, 7, "it is too large")]
    world.topic.takes.set()
    ship()
    until(lambda: world.closed, "the others are shipped")
    looked_for_nothing(world)
    assert world.opened == [world.left], "it was not given up between"


def test_a_slot_of_which_nothing_is_shipped_is_left_for_a_while(world, ship, monkeypatch, caplog):
    monkeypatch.setattr(slots, "_STUCK_S", 0.0)
    monkeypatch.setattr(slots, "_POLL_S", 0.001)
    world.moves = False
    world.leave(taken := world.own.directory.with_name("slot-2"))
    world.fails = {taken: LogLocked(taken, None, is_own=False)}
    ship()
    until(lambda: world.opened.count(taken) >= LOOKS, "it looks again and again")
    assert world.closed == [world.left]
    assert world.opened.count(world.left) == 1, "it is left for a while"
    assert "can't be shipped now: partition 0: it is too large" in caplog.text


def test_who_ships_a_slot_for_others_does_not_ask_itself_for_it(world, ship):
    ship()
    until(lambda: world.opened, "it is shipped for others")
    take_back(world.left)
    assert not world.closed, "nobody wants it"


@pytest.mark.parametrize(
    ("holds_two", "answers", "waits"),
    [
        (True, [False], 0),  # it has both for its own
        (True, [BadArgument("call", "there is none")], 0),
        (True, [None, True, True], 3),  # it is just opening it, then ships it for others, and closes it at last
        (False, ["not asked"], 0),  # it has the slot for its own
    ],
)
def test_a_slot_is_asked_for_until_it_is_closed_only_of_who_ships_it_for_others(
    tmp_path, monkeypatch, holds_two, answers, waits
):
    slot, other = tmp_path / "slot-1", tmp_path / "slot-0"
    for one in (slot, other):
        Outbox.open(one, "orders", 1, "billing").close()
    monkeypatch.setattr(slots, "_GIVEN_UP_S", 1e9)
    monkeypatch.setattr(slots, "_ASK_S", 10)
    waited = []

    def give_up(_):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    with ExitStack() as stack:
        held = [LogDirectory.acquire(one) for one in ((slot, other) if holds_two else (slot,))]
        if answers[:1] != [None]:
            stack.enter_context(ControlServer(slot, lambda _: {"give-up": give_up}))

        def sleep(_):  # between two questions
            waited.append(len(answers))
            if answers[:1] == [None]:
                answers.pop(0)
                stack.enter_context(ControlServer(slot, lambda _: {"give-up": give_up}))
            elif not answers:
                held.pop(0).release()

        monkeypatch.setattr(slots, "sleep", sleep)
        take_back(slot)
    for one in held:
        one.release()
    assert answers == ([] if holds_two else ["not asked"])
    assert len(waited) == waits
