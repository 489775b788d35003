"""Arguments of `Outbox.open` for tests that name many settings: fields of OutboxConfig go into `config`."""

from typing import Any

from pushrep import OutboxConfig
from pushrep.settings import settings_of


def outbox_arguments(**given: Any) -> dict[str, Any]:
    """`given` for `Outbox.open(**outbox_arguments(linger_ms=0, acks=...))`, with one `config`."""
    config = {name: given.pop(name) for name in settings_of(OutboxConfig) if name in given}
    return given | ({"config": OutboxConfig(**config)} if config else {})
