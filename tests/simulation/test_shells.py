"""The real shells of replication on simulated clock, disks and network, in seeded disorder; each promise broken once.

A failing world is shrunk, and tells how it is run again.
"""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from pushrep.election import follower
from pushrep.log import Durability
from pushrep.replicate import replica
from tests.simulation.shells_mutations import LOSSY, MUTATIONS, answer_before_the_flush
from tests.simulation.shells_shrink import fails, shrink
from tests.simulation.shells_world import Rules, Violation, World, run

STEPS = 1_000
STEPS_LONG = 1_000_000
TRIES_MAX = 400  # the first seed is near one that is known to see it; code that changes may move it
LONG_S = 240  # on a busy machine the long form ends here, with fewer worlds
PROCESSES_DIE = (2, 0, 0, 2, 2, 1, 0, 2, 0.5, 0.5)
WORLDS = {
    "three, m = 2": Rules(),
    "three, m = 3": Rules(min_insync=3),
    "five, m = 3": Rules(members=5, min_insync=3),
    "two partitions": Rules(partitions=2),
    "losses are accepted": Rules(accepts_loss=True),
    "clocks jump": Rules(jumps=True, rates=(0.015,)),
    "disks are slow": Rules(sync_ms=(0, 10, 60)),
    "disks are lost": Rules(wipes=True, rates=(0.015,)),
    "page cache, processes die": Rules(durability=Durability.BUFFERED, accidents=PROCESSES_DIE),
}


@pytest.mark.parametrize("rules", WORLDS.values(), ids=WORLDS)
def test_what_was_acknowledged_survives_any_disorder(rules, torture):
    """A record acknowledged with ALL survives any m - 1 lost members and any order of opens, crashes, power cuts and
    promotions; logs are equal epoch by epoch; watermarks, receipts and buffers keep their promises.
    """
    worlds = torture.count(1, STEPS_LONG // STEPS // len(WORLDS))
    until_s = time.monotonic() + LONG_S
    for seed in range(torture.seed, torture.seed + worlds):
        if time.monotonic() > until_s and seed > torture.seed:
            break
        failure = fails(seed, rules, STEPS)
        if failure is not None:
            pytest.fail(str(shrink(failure)))


def test_a_lost_disk_whose_service_learns_of_another_leader_counts_for_nothing():
    """It stores that grant as its first one, with no record."""
    assert run(30194, WORLDS["disks are lost"], 739, skip={2, 6, 7}).counts["wiped"] == 1


def test_a_lost_disk_that_was_granted_the_lead_and_did_not_begin_it_is_no_first_leader():
    """Its next try has the newest grant and no record, and something was acknowledged before."""
    run(35025, WORLDS["disks are lost"], 1000, skip={1, 3, 5, 7, 11, 13, 14, 16, 18})


def test_a_lost_disk_whose_grant_another_remembers_is_no_first_leader():
    """A member without a record shows the grant by which it led before, and something was acknowledged since."""
    run(35084, WORLDS["disks are lost"], 1000, skip={1, 4, 7, 10, 11, 12, 15, 16})


def test_an_unfilled_member_that_alone_stored_a_newer_grant_is_named_as_such():
    """The node was just made, and its attempt to lead failed: an operator reads why it gets nothing, and ends that."""
    run(35079, WORLDS["three, m = 3"], 1000)


def test_a_promotion_that_came_no_further_begins_no_list_beside_that_of_the_first_leader():
    """Its newer list would refuse what the first leader pushes, which began sessions with it for ever."""
    run(35092, WORLDS["page cache, processes die"], 1000, skip={10, 11, 12, 13, 14, 15})


def test_the_worlds_meet_what_they_are_about():
    """Every accident, and what comes of them, in a few seeds: else the worlds prove nothing."""
    counts = {}
    for seed in range(1, 9):
        rules = Rules(rates=(0.05,), jumps=seed % 4 == 1) if seed % 2 else Rules()
        for what, count in run(seed, rules, STEPS).counts.items():
            counts[what] = counts.get(what, 0) + count
    wanted = {
        "crash", "power", "power_soon", "cut", "block", "pause", "disk", "promote", "stop", "time", "jump",
        "OPEN", "PROMOTE", "PROMOTE_AND_CATCH_UP", "leads", "refused", "acknowledged", "failed",
    }  # fmt: skip
    assert wanted <= counts.keys(), f"never met: {wanted - counts.keys()}"
    assert counts["acknowledged"] > 50


def test_a_seed_replays_whatever_the_process():
    """Two processes, which hash differently and place objects elsewhere, live the same life, full of accidents."""
    code = (
        "from tests.simulation.shells_world import Rules, run; "
        "print(*run(11, Rules(rates=(0.05,)), steps=1500).trace, sep='\\n')"
    )
    lives = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(lives) == 1
    assert "acknowledged" in lives.pop()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.breaks for mutation in MUTATIONS])
def test_a_broken_promise_is_seen(mutation, monkeypatch):
    mutation.apply(monkeypatch.setattr)
    for seed in range(mutation.first_seed, mutation.first_seed + TRIES_MAX):
        if fails(seed, mutation.rules, STEPS) is not None:
            monkeypatch.undo()
            again = fails(seed, mutation.rules, STEPS)
            assert again is None, f"it was not the mutation that was seen: {again}"
            return
    pytest.fail(f"{TRIES_MAX} worlds did not notice that it does not hold: {mutation.breaks}")


def test_a_leader_that_an_accepted_loss_did_not_reach_counts_what_was_true(monkeypatch):
    """The leader is not fenced, and can't learn that a member has cut its log for another leader since it answered. Its
    last answer has to have been true: a member that acknowledges without writing is detected.
    """

    def follow(state, request, batch_at, original=follower.follow):
        effects = original(state, request, batch_at)
        if world.losses and request.leader_epoch < world.losses[-1]:
            return tuple(one for one in effects if not isinstance(one, follower.Append | follower.Flush))
        return effects

    for seed in range(328, 328 + TRIES_MAX):  # the first one is known to meet it; code that changes may move it
        if "unfenced" not in run(seed, LOSSY, STEPS).counts:
            continue
        with closing(World(seed, LOSSY)) as world, monkeypatch.context() as patch:
            patch.setattr(replica, "follow", follow)
            try:
                world.live(STEPS)
            except Violation:
                if "unfenced" in world.counts:
                    return
    pytest.fail(f"in {TRIES_MAX} worlds no untrue answer was seen")


def test_a_failing_seed_is_shrunk(monkeypatch):
    answer_before_the_flush(monkeypatch.setattr)
    failure = next(found for seed in range(50) if (found := fails(seed, Rules(rates=(0.05,)), STEPS)) is not None)
    small = shrink(failure)
    again = fails(small.seed, small.rules, small.steps, small.skip)
    assert again == small, "what was shrunk fails again, in the same way"
    assert (small.accidents, small.steps) <= (failure.accidents, failure.steps)
    assert f"run({small.seed}, " in str(small)
