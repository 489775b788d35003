"""How records are pushed, and to whom. Each class checks its values when it is made."""

import ssl
from dataclasses import dataclass

from pushrep.env import REAL_NETWORK, Network
from pushrep.errors import BadArgument
from pushrep.replicate.sockets import Address


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

    max_workers: threads that talk to replicas, shared by all managers of the process that name as many.
    workers_per_replica: connections to each, its partitions spread over them.
    buffer_bytes_max: of records that are kept for replicas that have not acknowledged them; what is above is read from
        the log again.
    request_bytes_max: records in one request; a larger batch goes alone.
    request_file_bytes_max: the same of records that are sent from the log's file, to a replica that lacks many: they
        take no memory here, and a larger request costs less per byte.
    requests_in_flight_max: per connection; more hides a longer way. One from the file counts as so many times
        request_bytes_max as it has.
    linger_ms: how long a request waits for more records. watermark_linger_ms: how long a watermark waits for records to
        ride with; on an idle connection not at all, where the one before waited in vain.
    request_timeout_ms: without an answer for so long the connection is given up, and what was in flight sent again.
    connect_timeout_ms: of one attempt, handshakes included. backoff_min_ms, backoff_max_ms: between attempts, random.
    shutdown_timeout_ms: how long `shutdown` waits for its threads.
    repair_interval_ms: how often a replica is asked which segments its scrub found damaged; 0: never, and what is found
        damaged here is not fetched either.
    tls: what the connections are secured with; None: they are not.
    network: where connections and the threads that wait for them come from.
    """

    max_workers: int = 4
    workers_per_replica: int = 1
    buffer_bytes_max: int = 200 << 20
    request_bytes_max: int = 1 << 20
    request_file_bytes_max: int = 4 << 20
    requests_in_flight_max: int = 12
    linger_ms: int = 0
    watermark_linger_ms: int = 2
    request_timeout_ms: int = 30_000
    connect_timeout_ms: int = 5_000
    backoff_min_ms: int = 50
    backoff_max_ms: int = 2_000
    shutdown_timeout_ms: int = 3_000
    repair_interval_ms: int = 30_000
    tls: ssl.SSLContext | None = None
    network: Network = REAL_NETWORK

    def __post_init__(self) -> None:
        for name, low in (
            ("max_workers", 1),
            ("workers_per_replica", 1),
            ("buffer_bytes_max", 0),
            ("request_bytes_max", 1),
            ("request_file_bytes_max", 1),
            ("requests_in_flight_max", 1),
            ("linger_ms", 0),
            ("watermark_linger_ms", 0),
            ("request_timeout_ms", 1),
            ("connect_timeout_ms", 1),
            ("backoff_min_ms", 1),
            ("backoff_max_ms", self.backoff_min_ms),
            ("shutdown_timeout_ms", 1),
            ("repair_interval_ms", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise BadArgument(name, f"give a whole number of at least {low}, not {value!r}")
