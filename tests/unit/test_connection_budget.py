"""What the peers of a port may cost: connections, bytes, time; of each and in sum."""

import logging
import resource
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from pushrep.replicate import budget as budgets
from pushrep.replicate.budget import ConnectionBudget

WAIT_S = 30
LOG = logging.getLogger("test")


class Still:
    """A clock that is set."""

    def __init__(self):
        self.ms = 0

    def monotonic_ms(self):
        return self.ms


class Wire:
    """A socket that notes whether it was shut down."""

    is_cut = False

    def shutdown(self, _how):
        self.is_cut = True


@pytest.fixture
def made():
    budgets = []

    def make(**given):
        budgets.append(ConnectionBudget("test", LOG, clock=given.pop("clock", Still()), **given))
        return budgets[-1]

    yield make
    for one in budgets:
        one.stop()


def admit(budget, address="10.0.0.1", count=1):
    return [budget.admit(address, Wire()) for _ in range(count)]


def cut(ones):
    return sum(one.socket.is_cut for one in ones)


def test_n1_connections_are_a_quarter_of_the_descriptors_after_the_limit_was_raised():
    told = "import logging, resource; from pushrep.replicate.budget import ConnectionBudget as B\n"
    told += "logging.basicConfig(); b = B('node', logging.getLogger(), connections_max=1024); b.stop()\n"
    told += "print(b.connections_max, resource.getrlimit(resource.RLIMIT_NOFILE))"
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 800))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", told], preexec_fn=limit, capture_output=True, text=True, check=True)
    assert done.stdout == "200 (800, 800)\n"
    assert "at most 200 connections (of 800 descriptors), 100 without a role, 50 of one identity" in done.stderr


def test_n1_without_a_role_a_random_one_of_whoever_has_most_makes_room(made):
    budget = made(connections_max=20)
    (well,) = admit(budget, "10.0.0.9")
    many = admit(budget, count=1_000)
    assert len(budget) == 10
    assert not cut([well])
    assert cut(many) == 991
    assert budget.closed["full"] == 991
    spread = [one for number in range(100) for one in admit(budget, f"10.0.1.{number}")]
    assert 80 <= cut(spread) < 100, "with one each, any may be the one"


def test_n1_the_one_that_makes_room_is_not_to_be_foretold(made):
    def left():
        budget = made(connections_max=20)
        ones = admit(budget, count=100)
        return tuple(number for number, one in enumerate(ones) if not one.socket.is_cut)

    assert len({left() for _ in range(20)}) > 1


def test_n1_half_is_for_those_with_a_role_and_a_quarter_for_one_identity(made, caplog):
    budget = made(connections_max=16)
    mine = admit(budget, "a", 8)
    assert [one.promote() for one in mine] == [True] * 4 + [False] * 4, "a quarter of 16"
    assert "4 connections of 'a', 4 of all with a role" in caplog.text
    others = [one for name in ("b", "c", "d") for one in admit(budget, name, 2)]
    assert sum(one.promote() for one in others) == 4, "half of 16, with a's"
    admit(budget, "e", 100)
    assert not cut(mine[:4]), "what has no role takes no place of one that has"
    assert len(budget) == 16
    mine[0].leave()
    mine[0].leave()
    (again,) = admit(budget, "a")
    assert again.promote()
    assert again.promote(), "once"


def test_n1_one_that_was_closed_meanwhile_gets_no_role(made):
    budget = made(connections_max=2)
    first, _ = admit(budget, count=2)
    assert first.socket.is_cut
    assert not first.promote()
    first.leave()
    assert len(budget) == 1


def test_n3_bytes_wait_for_the_sum_and_for_the_identity_s_quarter(made):
    budget = made(held_bytes_max=400)
    mine, second, b, c, d, e = [one for name in ("a", "a", "b", "c", "d", "e") for one in admit(budget, name)]
    mine.hold(60)
    waiting = Held(second, 60)
    assert not waiting.has_it(), "above a quarter of 400"
    mine.give_back()
    assert waiting.ends()
    for one in (b, c, d):
        one.hold(100)
    last = Held(e, 80)
    assert not last.has_it(), "360 and 80 are above the sum"
    b.leave()
    assert last.ends()
    assert budget.held_bytes == 340


def test_n3_more_than_a_share_is_held_alone_and_a_second_one_never_waits_for_itself(made):
    budget = made(held_bytes_max=100)
    (one,) = admit(budget)
    one.hold(500)
    with pytest.raises(ConnectionError, match="before its last one"):
        one.hold(1)
    one.give_back()
    one.hold(26)


def test_n3_nobody_waits_at_a_port_that_is_closed(made):
    budget = made(held_bytes_max=100)
    one, other = admit(budget, count=2)
    one.hold(25)
    waiting = Held(other, 25)
    assert not waiting.has_it()
    budget.stop()
    assert isinstance(waiting.failure(), ConnectionError)


class Held:
    """A thread that holds bytes, or waits for them."""

    def __init__(self, one, size):
        self.one, self.size, self.error = one, size, None
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.begun.wait(WAIT_S)

    def run(self):
        self.begun.set()
        try:
            self.one.hold(self.size)
        except OSError as error:
            self.error = error

    def has_it(self):
        return self.one.held_bytes > 0

    def ends(self):
        self.thread.join(WAIT_S)
        return not self.thread.is_alive() and self.error is None and self.has_it()

    def failure(self):
        self.thread.join(WAIT_S)
        return self.error


def test_n2_who_lets_a_deadline_pass_is_closed_and_without_a_role_nothing_moves_it(made):
    clock = Still()
    budget = made(first_s=10, clock=clock)
    stranger, speaks, idle = admit(budget, count=3)
    assert speaks.promote()
    assert idle.promote()
    for one in (stranger, speaks, idle):
        one.expect(budgets.REQUEST_S)
    idle.relax()
    stranger.relax()
    clock.ms = 9_999
    budget.close_late()
    assert not cut([stranger, speaks, idle])
    clock.ms = 10_000
    budget.close_late()
    assert cut([stranger]) == 1
    assert not cut([speaks, idle])
    clock.ms = 30_000
    budget.close_late()
    budget.close_late()
    assert (cut([speaks]), cut([idle]), budget.closed["late"]) == (1, 0, 2)


def test_n2_one_that_is_closed_while_its_handshake_begins_does_not_begin_it(made):
    budget = made(connections_max=2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = budget.admit("10.0.0.1", ours)
        admit(budget)
        context = SimpleNamespace(wrap_socket=lambda sock, **_: sock)
        with pytest.raises(ConnectionError, match="closed for another"):
            one.secure(context)
        assert theirs.recv(1) == b""


def test_who_left_frees_its_place_and_leaves_once(made):
    budget = made(connections_max=8)
    for _ in range(3):
        ones = admit(budget, count=4)
        assert [one.promote() for one in ones] == [True, True, False, False], "of one identity a quarter"
        assert len(budget) == 4
        for one in (*ones, *ones):
            one.leave()
        assert len(budget) == 0
        assert not ones[2].promote(), "it is closed"
    assert cut(ones) == 0
