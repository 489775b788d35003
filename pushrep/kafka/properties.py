"""A client's properties file as a destination: lines `name=value`, as kcat -F and librdkafka's tools read them."""

from pathlib import Path

from pushrep.errors import BadArgument
from pushrep.kafka.destination import KafkaDestination

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
    settings: dict[str, str | int] = {}
    for number, line in enumerate([] if file is None else file.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith(("#", "!")):
            continue
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in _FIELDS:
            raise BadArgument(name if equals else "config", f"line {number}: known are {', '.join(_FIELDS)}")
        field = _FIELDS[name]
        if field in _NUMBERS and not (value.isascii() and value.isdigit()):
            raise BadArgument(name, f"line {number}: give a number of milliseconds")
        settings[field] = int(value) if field in _NUMBERS else value
    return KafkaDestination(bootstrap_servers=bootstrap_servers, topic=topic, **settings)  # type: ignore[arg-type]
