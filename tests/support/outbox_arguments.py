"""Arguments of `Outbox.open` for tests that name many settings: they go into `config`, batch_bytes into its logs'."""

from dataclasses import replace
from typing import Any

from pushrep import LogConfig, OutboxConfig
from pushrep.settings import settings_of


def outbox_arguments(**given: Any) -> dict[str, Any]:
    """`given` for `Outbox.open(**outbox_arguments(linger_ms=0, acks=...))`, with one `config`."""
    if (batch_bytes := given.pop("batch_bytes", None)) is not None:
        given["log_config"] = replace(given.get("log_config", LogConfig()), batch_bytes=batch_bytes)
    config = {name: given.pop(name) for name in settings_of(OutboxConfig) if name in given}
    return given | ({"config": OutboxConfig(**config)} if config else {})
