"""A leader in a separate process: it appends as fast as its replicas acknowledge, and prints what was acknowledged.

python leading_program.py DIRECTORY OUTBOX_ID EPOCH INDEX=HOST:PORT ...

It prints `leads` when it pushes, and `acked OFFSET VALUE` for each append that m members hold. At the end of its input
it pushes everything that a replica lacks, prints `ends OFFSET`, and stops.
"""

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

IN_FLIGHT = 64
CONFIG = LogConfig(segment_bytes=200_000, preallocate_bytes=0)


def main(directory, outbox_id, epoch, *replicas):
    epoch = int(epoch)
    replicas = [
        Replica(int(index), Address.parse(address)) for index, address in (text.split("=") for text in replicas)
    ]
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
    with SegmentLog.open(Path(directory) / "orders-0", CONFIG, has_replicas=True) as log:
        settings = PushSettings(backoff_min_ms=5, backoff_max_ms=100, request_bytes_max=20_000)
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
        say("leads")
        append_until_told(log, leading, epoch)
        pause = threading.Event()
        while not all(
            progress.is_live and progress.acknowledged == log.log_end_offset
            for progress in (leading.partitions[0].leader.sessions.get(replica.index) for replica in replicas)
            if progress is not None
        ) or len(leading.partitions[0].leader.sessions) < len(replicas):
            pause.wait(0.01)
        leading.close()
        say(f"ends {log.log_end_offset}")


def append_until_told(log, leading, epoch):
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
    free = threading.Semaphore(IN_FLIGHT)
    number = 0
    while not told.is_set():
        if not free.acquire(timeout=0.05):
            continue
        values = [b"%d-%d-%d-" % (epoch, number, n) + b"x" * (number * 37 % 300) for n in range(1 + number % 5)]
        batch = encode_batch(values, timestamps_ms=number)
        result = log.append(batch, durability=Durability.BUFFERED)

        def acked(error, offset=result.base_offset, number=number):
            free.release()
            if error is None:
                say(f"acked {offset} {epoch}-{number}-0-")

        leading.partitions[0].on_append(result.base_offset, [batch], SYSTEM_CLOCK.monotonic_ms())
        leading.partitions[0].when_replicated(result.last_offset + 1, acked)
        number += 1


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
