"""Members on nothing but the pure rules of replication, in seeded disorder; and each rule broken once, which is seen.

A failing seed repeats: World(seed, rules).steps(n).
"""

import itertools

import pytest

from tests.simulation.replication_mutations import MUTATIONS
from tests.simulation.replication_world import Rules, Violation, World

STEPS = 2_000
WORLDS = {
    "three, m = 2": Rules(),
    "three, m = 3": Rules(min_insync=3),
    "three, m = 1": Rules(min_insync=1),
    "four, m = 3": Rules(members=4, min_insync=3, machines=4),
    "four, m = 2": Rules(members=4, min_insync=2, machines=4),
    "five, m = 3": Rules(members=5, min_insync=3, machines=5),
    "a leader that lives is left alone": Rules(leader_alive_steps=100),
    "a leader that lives is left alone by five": Rules(members=5, min_insync=3, machines=5, leader_alive_steps=150),
    "disks are lost": Rules(wipes=0.1),
    "disks are lost, one of two": Rules(members=2, machines=2, wipes=0.1),
    "disks are lost, of five": Rules(members=5, min_insync=3, machines=5, wipes=0.1),
    "losses are accepted, and the lost come back": Rules(forces=True),
    "losses are accepted, of five": Rules(members=5, min_insync=3, machines=5, forces=True),
    "a member lies": Rules(lies=0.2),
    "a member of five lies, and members change": Rules(
        members=5, min_insync=3, machines=5, lies=0.2, changes_members=True
    ),
    "page cache, processes die": Rules(flushed_only=False, loses_power=False),
    "members change": Rules(machines=5, changes_members=True),
    "members change from four": Rules(members=4, min_insync=3, machines=5, changes_members=True),
    "members change from two": Rules(
        members=2, machines=4, changes_members=True, flushed_only=False, loses_power=False
    ),
}


def run(seed, rules, steps=STEPS):
    world = World(seed, rules)
    try:
        world.steps(steps)
    except Violation as violation:
        story = "\n".join(world.trace)
        pytest.fail(f"World({seed}, {rules}).steps({steps}): {violation}\n{story}")
    return world


@pytest.mark.parametrize("rules", WORLDS.values(), ids=WORLDS)
def test_what_was_acknowledged_survives_any_disorder(rules, torture):
    """Promise of `Members, grants, epochs`: it survives any m - 1 lost, in any order of opens, crashes, promotions."""
    worlds, acknowledged = torture.count(4, 1_000), 0
    for seed in itertools.count(torture.seed):
        if seed >= torture.seed + worlds and (acknowledged or seed == torture.seed + 10 * worlds):
            break  # where every member must have a batch, a few worlds in a row may acknowledge nothing
        acknowledged += run(seed, rules).committed_end
    assert acknowledged, "nothing was acknowledged: the worlds prove nothing"


def test_the_worlds_meet_what_they_are_about():
    """Every effect, every answer of the table, truncation and catching up: in some seeds, as many as that takes."""
    wanted = {
        "StoreEpoch", "StoreGrant", "BeginEpoch", "Truncate", "SetAside", "SetLogStart", "SetUnfencedAside",
        "Fetch", "Lead", "Refused", "Resigned", "Joined", "Left", "HighWatermarkMoved", "SessionEnded",
        "LOG_DIVERGED", "FENCED_LEADER_EPOCH", "STALE_SESSION", "ungranted", "change_members", "wipe", "admitted",
        "force", "aside", "settled", "lies", "Contested",
    }  # fmt: skip
    rules = (
        Rules(),
        WORLDS["members change"],
        WORLDS["disks are lost, one of two"],
        Rules(forces=True),
        Rules(lies=0.2),
    )
    for seed, these in itertools.product(range(30), rules):
        wanted -= {what for what, count in World(seed, these).steps(800).counts.items() if count}
        if not wanted:
            return
    pytest.fail(f"never met: {wanted}")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.breaks for mutation in MUTATIONS])
def test_a_broken_rule_is_seen(mutation, monkeypatch):
    def patch(owner, name, value):
        monkeypatch.setattr(owner, name, value)

    mutation.apply(patch)
    for seed in range(mutation.first_seed, mutation.first_seed + 300):
        try:
            World(seed, mutation.rules).steps(STEPS)
        except (Violation, AssertionError):
            return
    pytest.fail(f"300 worlds did not notice that it does not hold: {mutation.breaks}")
