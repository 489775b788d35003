"""A node's settings. Each value is checked when it is made."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pushrep.errors import BadArgument
from pushrep.log import LogConfig
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.access import ANONYMOUS, LOCAL, Policy, read_rules
from pushrep.replicate.reloading import CertificateFiles
from pushrep.replicate.sockets import Address
from pushrep.wire.frames import FrameLimits

BATCH_BYTES_MAX = 64 << 20
DEFAULT_ADDRESS = Address("127.0.0.1", 7400)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How a ReplicaNode listens and what it keeps.

    address: where it listens; port 0 lets the system choose. Off loopback it wants `tls`, or `plain_off_loopback`.
    allow: who may do what (docs/access.md): `NAME=PATTERN:role,role`, or a name in client certificates, which then may
        create outboxes and leads and lists its own; an outbox's id, or "any": all of it, everybody.
    allow_file: more of it, one a line, read again when it changes.
    certificates: in place of `tls`, the files of a server's mutual TLS, read again when they change.
    flush: every answer comes after fsync, whatever the leader asks for.
    log_config: of every log here.
    copy_check: False: do not ask whether an outbox's directory is a copy of another (a restored backup, a clone).
    limits: of a frame; a connection holds at most one.
    replay: how many replays may run, and how long they wait. replay_counters: what else may bound one, by name.
    connections_max: beyond it, the oldest connection that has sent no request yet is closed; if there is none, the new
        connection is refused.
    handshake_timeout_s: within it a connection says what it speaks.
    stop_timeout_s: how long requests that are being carried out may hold up `stop`.
    """

    address: Address = DEFAULT_ADDRESS
    allow: frozenset[str] = frozenset()
    allow_file: Path | None = None
    certificates: CertificateFiles | None = None
    flush: bool = False
    log_config: LogConfig = field(default_factory=lambda: LogConfig(batch_bytes_max=BATCH_BYTES_MAX))
    copy_check: bool = True
    limits: FrameLimits = field(default_factory=FrameLimits)
    tls: ssl.SSLContext | None = None
    plain_off_loopback: bool = False
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    replay_counters: Mapping[str, Callable[[], int | None]] = field(default_factory=dict)
    connections_max: int = 1024
    handshake_timeout_s: float = 10
    stop_timeout_s: float = 10

    def __post_init__(self) -> None:
        if self.tls is not None and self.certificates is not None:
            raise BadArgument("tls", "give a context, or files (certificates), not both")
        if not self.address.is_loopback and not self.is_secured and not self.plain_off_loopback:
            raise BadArgument(
                "address",
                f"{self.address} is reached from other machines: give a certificate (TLS), or say that plain text is "
                "meant (plain_off_loopback)",
            )
        if self.connections_max < 1:
            raise BadArgument("connections_max", f"{self.connections_max} is below 1")
        Policy.of(self.rules())
        for name in ("handshake_timeout_s", "stop_timeout_s"):
            if getattr(self, name) <= 0:
                raise BadArgument(name, f"{getattr(self, name)} is not above 0")

    @property
    def is_secured(self) -> bool:
        """Whether peers show certificates."""
        return self.tls is not None or self.certificates is not None

    @property
    def plain_identity(self) -> str:
        """The identity of a peer without a certificate: `local` where only this machine reaches the node, else
        `anonymous`.
        """
        return LOCAL if self.address.is_loopback else ANONYMOUS

    def rules(self) -> list[str]:
        """Everything that is allowed, as it is written now. Raises BadArgument."""
        return [*sorted(self.allow), *([] if self.allow_file is None else read_rules(self.allow_file))]
