"""How records are pushed, and to whom. Each class checks its values when it is made."""

import ssl
from dataclasses import dataclass
from typing import Annotated

from pushrep.env import REAL_NETWORK, Network
from pushrep.errors import BadArgument
from pushrep.replicate.sockets import Address
from pushrep.settings import Between, check

_Count = Annotated[int, Between(0)]
_FromOne = Annotated[int, Between(1)]


@dataclass(frozen=True, slots=True)
class Replica:
    """A member that is pushed to: its index in the grant, and its address."""

    index: int
    address: Address

    def __str__(self) -> str:
        return f"replica {self.index} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Limits of a PushManager.

    max_workers: threads that talk to replicas, shared by all outboxes of the process that name as many.
    workers_per_replica: connections to each replica, its partitions spread over them.
    buffer_bytes_max: bytes of records that are kept in memory until replicas acknowledge them; above it the oldest are
        dropped, and read from the log again.
    request_bytes_max: bytes of records in one request; a larger batch goes alone.
    request_file_bytes_max: the same for records that are sent from the log's file, to a replica that lacks many: they
        take no memory here, and a larger request costs less per byte.
    requests_in_flight_max: requests of a connection without an answer; more hides a longer way. One from the file
        counts as so many as it has request_bytes_max.
    linger_ms: how long a request waits for more records.
    watermark_linger_ms: how long a watermark waits for records that it can be sent with. On an idle connection it is
        sent at once if no records came while the one before it waited.
    request_timeout_ms: without an answer for so long the connection is given up, and what was in flight sent again.
    connect_timeout_ms: of one attempt to connect, handshakes included.
    backoff_min_ms: the shortest of the random pauses between attempts, which never end.
    backoff_max_ms: the longest of them.
    shutdown_timeout_ms: how long a close waits for the threads.
    repair_interval_ms: how often a replica is asked which segments its scrub found damaged; 0: never, and what is found
        damaged here is not fetched either.
    tls: the context that secures the connections; None: plain connections.
    network: where connections and the threads that wait for them come from.
    """

    max_workers: _FromOne = 4
    workers_per_replica: _FromOne = 1
    buffer_bytes_max: _Count = 200 << 20
    request_bytes_max: _FromOne = 1 << 20
    request_file_bytes_max: _FromOne = 4 << 20
    requests_in_flight_max: _FromOne = 12
    linger_ms: _Count = 0
    watermark_linger_ms: _Count = 2
    request_timeout_ms: _FromOne = 30_000
    connect_timeout_ms: _FromOne = 5_000
    backoff_min_ms: _FromOne = 50
    backoff_max_ms: _FromOne = 2_000
    shutdown_timeout_ms: _FromOne = 3_000
    repair_interval_ms: _Count = 30_000
    tls: ssl.SSLContext | None = None
    network: Network = REAL_NETWORK

    def __post_init__(self) -> None:
        check(self)
        if self.backoff_max_ms < self.backoff_min_ms:
            raise BadArgument("backoff_max_ms", f"give at least backoff_min_ms={self.backoff_min_ms}")
