"""A client's properties file as a destination: lines `name=value`, as kcat -F and librdkafka's tools read them."""

from collections.abc import Mapping
from pathlib import Path

from pushrep.errors import BadArgument
from pushrep.kafka.destination import KafkaDestination

_SERVERS = "bootstrap.servers"
_FIELDS = {
    "client.id": "client_id",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_username",
    "sasl.password": "sasl_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_keyfile_password",
    "request.timeout.ms": "request_timeout_ms",
    "retry.backoff.ms": "retry_backoff_ms",
    "retry.backoff.max.ms": "retry_backoff_max_ms",
}
_NUMBERS = {"request_timeout_ms", "retry_backoff_ms", "retry_backoff_max_ms"}


def destination_of(bootstrap_servers: str, topic: str | None, file: Path | None) -> KafkaDestination:
    """The destination that a command line and a properties file (None: there is none) name.

    Raises BadArgument, which names the setting; values are not shown. OSError.
    """
    return destination_by({**read_properties(file), _SERVERS: bootstrap_servers}, topic)


def read_properties(file: Path | None) -> dict[str, str]:
    """What the file says, by its own names; nothing if there is none. Raises BadArgument, OSError."""
    settings: dict[str, str] = {}
    for number, line in enumerate([] if file is None else file.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith(("#", "!")):
            continue
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in _FIELDS:
            raise BadArgument(name if equals else "config", f"line {number}: known are {', '.join(_FIELDS)}")
        settings[name] = value
    return settings


def destination_by(settings: Mapping[str, str], topic: str | None) -> KafkaDestination:
    """The destination that settings name, bootstrap.servers among them. Raises BadArgument, which names the setting."""
    fields: dict[str, str | int] = {}
    for name, value in settings.items():
        if name == _SERVERS:
            continue
        if name not in _FIELDS:
            raise BadArgument(name, f"there is no such setting: known are {_SERVERS}, {', '.join(_FIELDS)}")
        field = _FIELDS[name]
        if field in _NUMBERS and not (value.isascii() and value.isdigit()):
            raise BadArgument(name, "give a number of milliseconds")
        fields[field] = int(value) if field in _NUMBERS else value
    servers = settings.get(_SERVERS, "")
    return KafkaDestination(bootstrap_servers=servers, topic=topic, **fields)  # type: ignore[arg-type]
