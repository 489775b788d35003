"""kill -9 of a producer during its appends: all acknowledged records are there, in order, under their keys."""

import signal

import pytest

from filtering import StreamMetadata
from pushrep.outbox import Outbox
from tests.programs import PythonProgram

PID = 4711

PRODUCER = """
import sys
from collections import deque
from filtering import StreamMetadata
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox, OutboxConfig

directory, carrier, durability, upstream = sys.argv[1:]
pending = deque()
with Outbox.open(
    directory, "orders", 2, "billing", carrier=carrier, durability=Durability[durability],
    config=OutboxConfig(
        linger_ms=1, log_config=LogConfig(batch_bytes=4096, segment_bytes=200_000, flush_ms=50),
    ),
) as outbox:
    if upstream == "yes":
        last = [outbox.last_metadata(4711, partition) for partition in range(2)]
    else:
        last = [outbox.last_metadata(outbox.pid, partition) for partition in range(2)]
    n = [0 if offset is None else offset + 1 for offset in last]
    print("start", *n, flush=True)
    while True:
        for partition in range(2):
            def position(at):
                return StreamMetadata(4711, partition, at) if upstream == "yes" else None
            first, values = n[partition], [b"%d" % (n[partition] + k) + bytes(50) for k in range(8)]
            for at, value in enumerate(values[:3], start=first):
                pending.append((partition, at, 1, outbox.append(partition, value, metadata=position(at))))
            many = outbox.append_many(partition, values[3:], metadata=position(first + 3))
            pending.append((partition, first + 3, 5, many))
            n[partition] += 8
        while len(pending) > 100 or (pending and pending[0][3].done()):
            partition, at, count, receipt = pending.popleft()
            print("ack", partition, at, count, receipt.result(), flush=True)
"""


def run_until_killed(arguments, acks_wanted):
    """(first number per partition, acknowledgements) of a producer killed after so many of them."""
    with PythonProgram("-c", PRODUCER, *arguments, has_errors=True) as producer:
        try:
            first = producer.stdout.readline().split()
            assert first, producer.stderr.read()
            acks = [producer.stdout.readline() for _ in range(acks_wanted)]
        finally:
            producer.kill()
        acks += producer.stdout.readlines()  # what it had told by then counts, too
        errors = producer.stderr.read()
    assert producer.returncode == -signal.SIGKILL, errors
    acks = [[int(field) for field in line.split()[1:]] for line in acks if line.endswith("\n")]  # the last may be cut
    return [int(number) for number in first[1:]], acks


@pytest.mark.parametrize(
    ("carrier", "durability", "upstream"),
    [("key", "FLUSHED", "yes"), ("key", "BUFFERED", "no"), ("header", "FLUSHED", "no"), ("header", "BUFFERED", "yes")],
)
def test_nothing_acknowledged_is_lost_or_reordered(tmp_path, carrier, durability, upstream, torture):
    chance = torture.random(carrier, durability)
    acknowledged = []
    for round_ in range(torture.count(3, 12)):
        told = f"seed {torture.seed}, round {round_}"
        starts, acks = run_until_killed([str(tmp_path), carrier, durability, upstream], chance.randint(1, 400))
        acknowledged += acks
        with Outbox.open(tmp_path, "orders", 2, "billing", carrier=carrier) as outbox:
            pid = PID if upstream == "yes" else outbox.pid
            for partition in range(2):
                records = list(outbox.log(partition).records(0))
                numbers = [int(record.value.rstrip(b"\0")) for record in records]
                assert numbers == list(range(len(numbers))), f"{told}: in order, without a hole or a double"
                carried = [r.key if carrier == "key" else r.headers[-1][1] for r in records]
                expected = [StreamMetadata(pid, partition, n).pack() for n in numbers]
                assert carried == expected, f"{told}: every key says where its record is"
                assert outbox.last_metadata(pid, partition) == (len(numbers) - 1 if numbers else None), told
                assert starts[partition] <= len(numbers), told
                for where, first, count, offset in acknowledged:
                    if where == partition:
                        assert numbers[offset : offset + count] == list(range(first, first + count)), (
                            f"{told}: record {first} was acknowledged at offset {offset}"
                        )
