"""A node's settings. Each value is checked when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pushrep.errors import BadArgument
from pushrep.log import LogConfig
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.access import ANONYMOUS, LOCAL, Policy, read_rules
from pushrep.replicate.budget import CONNECTIONS_MAX, HELD_BYTES_MAX
from pushrep.replicate.certificates import CertificateFiles
from pushrep.replicate.sockets import Address
from pushrep.settings import Between, check
from pushrep.wire.frames import FrameLimits

BATCH_BYTES_MAX = 64 << 20
DEFAULT_ADDRESS = Address("127.0.0.1", 7400)
_Seconds = Annotated[float, Between(0.001)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings of a ReplicaNode: its address, access rules, limits and files. Raises BadArgument.

    address: the address to listen on; with port 0 the system chooses one. Off loopback, give `certificates` or
        `plain_off_loopback`.
    allow: the access rules (docs/access.md): `NAME=PATTERN:role,role`; a name in client certificates, whose client may
        then create outboxes, and lead and list its own; an outbox's id, for all roles on it for everybody; "any", for
        all roles on every outbox for everybody.
    allow_file: a file with more rules, one a line. It is read again when it changes.
    certificates: the files for mutual TLS; None: none. They are read again when they change.
    flush: whether appended records are on disk before each answer, even if the leader does not ask for that.
    log_config: the settings of all logs of the node.
    copy_check: whether to detect that an outbox's directory is a copy of another one (a restored backup, a clone).
    limits: the limits of a frame; the node holds at most one frame for each connection.
    requests_bytes_max: the bytes of large requests and answers that the node holds, of all connections together; of one
        identity a quarter. Above that it reads no further until others are done.
    plain_off_loopback: whether to listen off loopback without TLS.
    replay: how many replays may run, and their timeouts. replay_counters: functions that bound a replay, by name.
    connections_max: the most open connections, at most a quarter of the descriptors (`ulimit -n`). Half is for
        connections that made a call for which they have a role, of one identity a quarter of all; without a role, one
        is closed for another.
    handshake_timeout_s: a connection that makes no call within this time for which it has a role is closed.
    stop_timeout_s: the time that `stop` waits for running requests.
    """

    address: Address = DEFAULT_ADDRESS
    allow: frozenset[str] = frozenset()
    allow_file: Path | None = None
    certificates: CertificateFiles | None = None
    flush: bool = False
    log_config: LogConfig = field(default_factory=lambda: LogConfig(batch_bytes_max=BATCH_BYTES_MAX))
    copy_check: bool = True
    limits: FrameLimits = field(default_factory=FrameLimits)
    plain_off_loopback: bool = False
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    replay_counters: Mapping[str, Callable[[], int | None]] = field(default_factory=dict)
    requests_bytes_max: Annotated[int, Between(1)] = HELD_BYTES_MAX
    connections_max: Annotated[int, Between(1)] = CONNECTIONS_MAX
    handshake_timeout_s: _Seconds = 10
    stop_timeout_s: _Seconds = 10

    def __post_init__(self) -> None:
        if not self.address.is_loopback and self.certificates is None and not self.plain_off_loopback:
            raise BadArgument(
                "address",
                f"{self.address} is reached from other machines: give a certificate (TLS), or say that plain text is "
                "meant (plain_off_loopback)",
            )
        check(self)
        Policy.of(self.rules())

    @property
    def plain_identity(self) -> str:
        """The identity of a client without a certificate: `local` if the node listens on loopback, else `anonymous`."""
        return LOCAL if self.address.is_loopback else ANONYMOUS

    def rules(self) -> list[str]:
        """All access rules: `allow`, and the present lines of `allow_file`. Raises BadArgument."""
        return [*sorted(self.allow), *([] if self.allow_file is None else read_rules(self.allow_file))]
