"""Whether a member still owns a partition: how long a coordinator's answer is valid, and for which member."""

from concurrent.futures import Future

import pytest

from filtering.consumers.startpoints import OwnershipCheck


class Coordinator:
    """A coordinator that answers when the test lets it."""

    def __init__(self):
        self.asked, self.now_s = [], 0.0
        self.holding = OwnershipCheck(self._ask, wait_s=0, now_s=lambda: self.now_s)

    def _ask(self, member):
        self.asked.append((member, Future()))
        return self.asked[-1][1]

    def says(self, *held):
        self.asked[-1][1].set_result(frozenset(held))

    def is_held(self, partition=0, member="m"):
        return self.holding.is_held(member, "orders", partition)


@pytest.fixture
def coordinator():
    return Coordinator()


def test_while_nobody_answers_it_is_not_known_and_not_asked_again(coordinator):
    for _ in range(5):
        coordinator.now_s += 1_000
        assert not coordinator.is_held()
    assert len(coordinator.asked) == 1


def test_an_answer_serves_all_partitions_of_a_look_and_the_next_look_asks_again(coordinator):
    assert not coordinator.is_held()
    coordinator.says(("orders", 0), ("orders", 2))
    coordinator.now_s = 30
    assert [coordinator.is_held(partition) for partition in range(3)] == [True, False, True]
    coordinator.now_s = 31
    assert coordinator.is_held()
    assert len(coordinator.asked) == 1
    coordinator.now_s = 31.5
    assert not coordinator.is_held(), "asked again"
    assert len(coordinator.asked) == 2


def test_an_answer_that_comes_long_before_the_next_look_counts_no_more(coordinator):
    coordinator.is_held()
    coordinator.now_s = 8
    coordinator.says(("orders", 0))
    coordinator.now_s = 69
    assert not coordinator.is_held()
    assert len(coordinator.asked) == 2


def test_what_was_said_of_another_id_of_this_client_is_nothing(coordinator):
    coordinator.is_held(member="m")
    coordinator.says(("orders", 0))
    assert not coordinator.is_held(member="n")
    assert [member for member, _ in coordinator.asked] == ["m", "n"]
    coordinator.says(("orders", 0))
    assert coordinator.is_held(member="n")


def test_a_client_without_an_id_is_no_member_and_asks_nobody(coordinator):
    assert not coordinator.is_held(member="")
    assert coordinator.asked == []


def test_an_answer_that_is_there_at_once_is_given_at_once():
    answer = Future()
    answer.set_result(frozenset({("orders", 0)}))
    assert OwnershipCheck(lambda _: answer).is_held("m", "orders", 0)


def test_what_nobody_expected_is_raised_to_the_reader(coordinator):
    coordinator.is_held()
    coordinator.asked[-1][1].set_exception(ValueError("no such setting"))
    with pytest.raises(ValueError, match="no such setting"):
        coordinator.is_held()
