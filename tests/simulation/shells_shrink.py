"""A world that went wrong, made small: fewer steps, fewer accidents, as long as it still goes wrong.

python -m tests.simulation.shells_shrink --seed 1234 --steps 1500        runs, shrinks, tells the story
"""

import argparse
from typing import NamedTuple

from tests.simulation.shells_world import Rules, World

TRIES_MAX = 200


class Failure(NamedTuple):
    """A run that goes wrong: `run(seed, rules, steps, skip)` repeats it."""

    seed: int
    rules: Rules
    steps: int
    skip: frozenset
    accidents: int
    error: str
    story: tuple

    def __str__(self):
        skip = f", skip={set(self.skip)}" if self.skip else ""
        again = f"run({self.seed}, {self.rules}, {self.steps}{skip})"
        return "\n".join([f"{self.error}\nagain, {self.accidents} accidents: {again}", *self.story])


def fails(seed, rules, steps, skip=frozenset()):
    """The failure of one run; None if it goes well."""
    world = World(seed, rules, skip)
    try:
        world.live(steps)
    except Exception as error:  # noqa: BLE001 - an assertion of the code is as wrong as one of the world
        left = world.trouble_number - len([number for number in skip if number <= world.trouble_number])
        taken = min(steps, max(1, world.step_number))
        return Failure(seed, rules, taken, skip, left, f"{type(error).__name__}: {error}", tuple(world.trace))
    finally:
        world.close()
    return None


def shrink(failure):
    """The smallest that was found in TRIES_MAX runs: halves, quarters ... of the accidents are left out in turn."""
    best, tries = failure, 0
    size = max(1, failure.accidents // 2)
    while tries < TRIES_MAX:
        numbers = [n for n in range(1, best.accidents + len(best.skip) + 1) if n not in best.skip]
        smaller = None
        for at in range(0, len(numbers), size):
            tries += 1
            found = fails(best.seed, best.rules, best.steps, best.skip | set(numbers[at : at + size]))
            if found is not None and (found.accidents, found.steps) < (best.accidents, best.steps):
                smaller = found
                break
            if tries >= TRIES_MAX:
                break
        if smaller is not None:
            best, size = smaller, min(size, max(1, smaller.accidents // 2))
        elif size == 1:
            break
        else:
            size //= 2
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=1_500)
    options = parser.parse_args()
    failure = fails(options.seed, Rules(), options.steps)
    print("it goes well" if failure is None else shrink(failure))  # noqa: T201


if __name__ == "__main__":
    main()
