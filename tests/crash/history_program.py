"""A leader in a separate process that serves clients: `append VALUE` and `read` by line on a port, one thread a client.

python history_program.py DIRECTORY OUTBOX_ID EPOCH INDEX=HOST:PORT ...

It prints `leads PORT` when it pushes, and stops at the end of its input. The answer to an append is its offset, once m
members hold the record; to a read, the number of records below the high watermark and their chained hash. Reads wait
until the watermark has reached the start of the leader's epoch: below it a new leader does not know yet what the former
leader acknowledged.
"""

import hashlib
import socketserver
import sys
import threading
from pathlib import Path
from uuid import UUID

from pushrep.election.grants import Grant, Member, default_min_insync
from pushrep.env import SYSTEM_CLOCK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.leading import Leading
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address

CONFIG = LogConfig(segment_bytes=200_000, preallocate_bytes=0)
WAIT_S = 30


def next_chain(chain, value):
    return hashlib.sha256((chain + value).encode()).digest()[:8].hex()


class Served:
    """The log as clients see it. `chains[n]` is of the first n records."""

    def __init__(self, log, leading):
        self._log, self._leading, self._led = log, leading, leading.partitions[0]
        self._append_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._chains = [""]

    def append(self, value):
        told, errors = threading.Event(), []

        def acknowledged(error):
            errors.append(error)
            told.set()

        with self._append_lock:
            batch = encode_batch([value.encode()], timestamps_ms=1)
            offset = self._log.append(batch, durability=Durability.BUFFERED).base_offset
            self._leading.partitions[0].on_append(offset, [batch], SYSTEM_CLOCK.monotonic_ms())
        self._leading.partitions[0].when_replicated(offset + 1, acknowledged)
        return f"ok {offset}" if told.wait(WAIT_S) and errors == [None] else "unknown"

    def read(self):
        told = threading.Event()
        self._leading.partitions[0].when_replicated(self._led.leader.epoch_start_offset, lambda _: told.set())
        if not told.wait(WAIT_S):
            return "unknown"
        with self._read_lock:
            end, chains = self._log.high_watermark, self._chains
            if end >= len(chains):
                for record in self._log.records(len(chains) - 1, end):
                    chains.append(next_chain(chains[-1], record.value.decode()))
            return f"ok {end} {chains[end]}"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            kind, _, value = line.decode().strip().partition(" ")
            served = self.server.served
            self.wfile.write((served.append(value) if kind == "append" else served.read()).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    served = None


def main(directory, outbox_id, epoch, *replicas):
    epoch = int(epoch)
    replicas = [Replica(int(index), Address.parse(at)) for index, at in (text.split("=") for text in replicas)]
    indexes = sorted({epoch % 256, *(replica.index for replica in replicas)})
    grant = Grant(
        outbox_id=UUID(outbox_id),
        epoch=epoch,
        leader=epoch % 256,
        members=tuple(Member(index) for index in indexes),
        min_insync_replicas=default_min_insync(len(indexes)),
        members_epoch=epoch,
        pid_epoch=0,
        topic_id=UUID(int=1),
        topic="orders",
        partitions=1,
        carrier="key",
    )
    settings = PushSettings(backoff_min_ms=5, backoff_max_ms=100)
    with SegmentLog.open(Path(directory) / "orders-0", CONFIG, has_replicas=True) as log:
        leading = Leading(
            grant.outbox_id,
            grant,
            {0: log},
            replicas,
            durability=Durability.BUFFERED,
            settings=settings,
            replica_lag_max_ms=300,
        )
        leading.start()
        with Server(("127.0.0.1", 0), Handler) as server:
            server.served = Served(log, leading)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            sys.stdout.write(f"leads {server.server_address[1]}\n")
            sys.stdout.flush()
            sys.stdin.read()
            server.shutdown()
        leading.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
