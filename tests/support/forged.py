"""JSON that somebody changed on purpose: each value may be any other."""

from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 70,
    0.5,
    float("inf"),
    "",
    "\ud800",
    "\x1b",
    "-1",
    [],
    {},
    [[]],
    {"": None},
)


def forged_value(random: Random, value: Any) -> Any:
    """Another value at one place of it, or one more, or one less."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name, known = random.choice(list(value)), dict(value)
        if random.random() < 0.1:
            del known[name]
        else:
            known[name] = forged_value(random, known[name])
        return known
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        return [*value[:at], forged_value(random, value[at]), *value[at + 1 :]]
    return random.choice(VALUES)
