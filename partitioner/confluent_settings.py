"""librdkafka's settings that hold the prefix condition, and those that would break it."""

from collections.abc import Mapping
from typing import Any

from partitioner.errors import BreaksPrefixCondition

# What holds the prefix condition. The guarantee covers neither timeouts nor brokers that know nothing of the producer.
HELD: Mapping[str, tuple[object, frozenset[object]]] = {
    "enable.idempotence": (True, frozenset({True, "true", "True"})),
    "acks": ("all", frozenset({"all", "-1", -1})),
    "enable.gapless.guarantee": (True, frozenset({True, "true", "True"})),
    "message.timeout.ms": (0, frozenset({0, "0"})),
    "max.in.flight.requests.per.connection": (1, frozenset({1, "1"})),
    "queuing.strategy": ("fifo", frozenset({"fifo"})),
    "delivery.report.only.error": (False, frozenset({False, "false", "False"})),
}
_ALIASES = {
    "request.required.acks": "acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
}
_OURS = {
    "transactional.id": "not for this producer: an aborted transaction takes records back that were acknowledged",
    "on_delivery": "given with each record: produce(..., on_delivery=...)",
    "dr_cb": "given with each record: produce(..., on_delivery=...)",
    "dr_msg_cb": "given with each record: produce(..., on_delivery=...)",
    "partitioner": "not for this producer: it picks the partition itself",
    "partitioner_cb": "not for this producer: it picks the partition itself",
    "default.topic.config": "not for this producer: give its settings beside the others",
}


def held_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings and those that hold the prefix condition. Raises BreaksPrefixCondition."""
    for name, value in config.items():
        if name in _OURS:
            raise BreaksPrefixCondition(name, value, _OURS[name])
        needed = HELD.get(_ALIASES.get(name, name))
        if needed is not None and value not in needed[1]:
            raise BreaksPrefixCondition(name, value, f"{needed[0]} in this producer")
    kept = {name: value for name, value in config.items() if name not in _ALIASES}
    return {**kept, **{name: value for name, (value, _) in HELD.items()}}
