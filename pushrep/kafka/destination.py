"""KafkaDestination: the topic that an outbox ships to, and how clients connect to its brokers. It connects nowhere.

Settings are spelled as Kafka's clients spell them, `_` for `.`. Secrets appear in no repr, message or log line. A
properties file has lines `name=value`, as kcat -F and librdkafka's tools read them.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pushrep.errors import BadArgument
from pushrep.settings import Between, OneOf, check, settings_of, with_near_names
from pushrep.topic_id_partition import topic_fault

_TOKENS = "OAUTHBEARER"
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", _TOKENS)
_FENCES = ("preferred", "required", "off")
_ON_REFUSED = ("stop", "park")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_Ms = Annotated[int, Between(1, (1 << 31) - 1)]  # both clients take 32 bits

Token = Callable[[], tuple[str, float]]
"""Returns an OAuth token and when it expires (Unix time, seconds). It is called in other threads."""


@with_near_names
@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDestination:
    """Where an outbox's records go: `Outbox.open(..., kafka=KafkaDestination(bootstrap_servers="broker:9092"))`.

    bootstrap_servers: "host:port" of the brokers that are asked first; several are separated by commas.
    topic: the topic's name; None: the outbox's topic. The topic has to exist. The number of its partitions that are
        used is fixed at first use.
    client_id: the client's name in brokers' logs and quotas.
    security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
    sasl_mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER (`sasl_oauth_token` returns the token and when it
        expires).
    sasl_username: the user of PLAIN and SCRAM.
    sasl_password: the user's password.
    ssl_cafile: the CA certificates that a broker's certificate is checked against (PEM); None: the system's.
    ssl_certfile: the client's certificate (PEM).
    ssl_keyfile: the client's private key (PEM).
    ssl_keyfile_password: the password of an encrypted private key.
    ssl_check_hostname: whether a broker's certificate must contain its host name.
    request_timeout_ms: a request that a broker does not answer within this time is sent again, over a new connection.
    retry_backoff_ms: the pause after the first failure; it doubles with each further failure.
    retry_backoff_max_ms: the longest pause between two attempts.
    fence: whether this instance fences other instances of the outbox at the topic, which needs the ACL WRITE for the
        transactional ids `pushrep-<outbox id>-*`. "preferred": without that right, records are shipped with a warning.
        "required": without it, nothing is shipped. "off": no instance is fenced.
    on_refused: what happens at a record that the topic refuses for itself (its time, its size, invalid). "stop": its
        partition stops. "park": it goes to the parking log, and its partition goes on.
    Raises BadArgument, which names the setting.
    """

    bootstrap_servers: str
    topic: str | None = None
    client_id: str = "pushrep"
    security_protocol: Annotated[str, OneOf(_PROTOCOLS)] = "PLAINTEXT"
    sasl_mechanism: Annotated[str | None, OneOf(_MECHANISMS)] = None
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    sasl_oauth_token: Token | None = field(default=None, repr=False)
    ssl_cafile: str | Path | None = None
    ssl_certfile: str | Path | None = None
    ssl_keyfile: str | Path | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_check_hostname: bool = True
    request_timeout_ms: _Ms = 30_000
    retry_backoff_ms: _Ms = 100
    retry_backoff_max_ms: _Ms = 1000
    fence: Annotated[str, OneOf(_FENCES)] = "preferred"
    on_refused: Annotated[str, OneOf(_ON_REFUSED)] = "stop"

    def __post_init__(self) -> None:
        check(self)
        servers = self.bootstrap_servers
        if not servers or not all(_is_address(one) for one in servers.split(",")):
            raise BadArgument(
                "bootstrap_servers", f"give 'host:port', several with commas, ports up to 65535, not {servers!r}"
            )
        if self.topic is not None and (why := topic_fault(self.topic)) is not None:
            raise BadArgument("topic", f"{self.topic[:300]!r}: {why}")
        self._check_sasl()
        self._check_tls()

    def _check_sasl(self) -> None:
        if not self.uses_sasl:
            for name in ("sasl_mechanism", "sasl_username", "sasl_password", "sasl_oauth_token"):
                if getattr(self, name) is not None:
                    raise BadArgument(name, f"security_protocol={self.security_protocol} uses no SASL: take SASL_SSL")
        elif self.sasl_mechanism is None:
            raise BadArgument("sasl_mechanism", f"give one of {', '.join(_MECHANISMS)}")
        elif self.sasl_mechanism == _TOKENS:
            if not callable(self.sasl_oauth_token):
                raise BadArgument("sasl_oauth_token", "give a function that returns a token and when it expires")
        elif not self.sasl_username or not self.sasl_password:
            raise BadArgument("sasl_username", f"{self.sasl_mechanism} needs sasl_username and sasl_password")

    def _check_tls(self) -> None:
        if not self.uses_tls:
            for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"):
                if getattr(self, name) is not None:
                    raise BadArgument(name, f"security_protocol={self.security_protocol} uses no TLS: take SSL")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise BadArgument("ssl_certfile", "ssl_keyfile needs the certificate that it belongs to")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in {"SSL", "SASL_SSL"}

    @property
    def uses_sasl(self) -> bool:
        """Whether the client names itself by SASL."""
        return self.security_protocol.startswith("SASL_")

    def ssl_context(self) -> ssl.SSLContext | None:
        """For asyncio; None without TLS. Raises OSError, `ssl.SSLError` for files that are no certificates."""
        if not self.uses_tls:
            return None
        context = ssl.create_default_context(cafile=self.ssl_cafile)
        context.check_hostname = self.ssl_check_hostname
        if self.ssl_certfile is not None:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        return context

    def librdkafka_settings(self) -> dict[str, Any]:
        """The same as confluent-kafka spells it."""
        settings = {_SERVERS: self.bootstrap_servers, **{name: getattr(self, _FIELDS[name]) for name in _LIBRDKAFKA}}
        settings["socket.timeout.ms"] = max(10, min(self.request_timeout_ms, 300_000))
        if self.uses_tls and not self.ssl_check_hostname:
            settings["ssl.endpoint.identification.algorithm"] = "none"
        if self.sasl_oauth_token is not None:
            token = self.sasl_oauth_token
            settings["oauth_cb"] = lambda _: token()
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in settings.items()
            if value is not None
        }


def _is_address(text: str) -> bool:
    host, colon, port = text.strip().rpartition(":")
    return bool(host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16)


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
_LIBRDKAFKA = _FIELDS.keys() - {"sasl.mechanisms", "request.timeout.ms", "retry.backoff.ms", "retry.backoff.max.ms"}


def destination_of(
    bootstrap_servers: str, topic: str | None, file: Path | None, on_refused: str = "stop"
) -> KafkaDestination:
    """The destination that a command line and a properties file (None: there is none) name.

    Raises BadArgument, which names the setting; values are not shown. OSError.
    """
    return replace(destination_by({**read_properties(file), _SERVERS: bootstrap_servers}, topic), on_refused=on_refused)


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
    known = settings_of(KafkaDestination)
    fields: dict[str, object] = {}
    for name, value in settings.items():
        if name == _SERVERS:
            continue
        if name not in _FIELDS:
            raise BadArgument(name, f"there is no such setting: known are {_SERVERS}, {', '.join(_FIELDS)}")
        try:
            fields[_FIELDS[name]] = known[_FIELDS[name]].value_of(value)
            known[_FIELDS[name]].check(fields[_FIELDS[name]])
        except BadArgument as error:
            raise BadArgument(name, error.why) from error
    servers = settings.get(_SERVERS, "")
    return KafkaDestination(bootstrap_servers=servers, topic=topic, **fields)  # type: ignore[arg-type]
