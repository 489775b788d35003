"""The outbox beside a list: whatever is appended, refused by a full disk and re-opened, the logs hold the list."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from filtering import StreamMetadata
from pushrep.log import LogConfig
from pushrep.outbox import DeliveryFailed, MetadataGap, Outbox
from pushrep.records import Codec
from tests.support.outbox_arguments import outbox_arguments
from tests.support.simulated_disk import SimulatedDisk

PARTITIONS = 3
SIZES = st.sampled_from([0, 1, 30, 200, 900])
# Source partitions 0 to 5: two of them share each partition of the outbox.
PAIRS = st.tuples(st.sampled_from([-5, 7]), st.integers(0, 2 * PARTITIONS - 1))


class OutboxModel(RuleBasedStateMachine):
    """`logs[p]`: what partition p holds, as (carried position or None for its own, value)."""

    @initialize(
        carrier=st.sampled_from(["key", "header"]),
        batch_bytes=st.sampled_from([300, 1500, 100_000]),
        linger_ms=st.sampled_from([0, 3_600_000]),
        codec=st.sampled_from([Codec.NONE, Codec.LZ4]),
    )
    def make(self, carrier, batch_bytes, linger_ms, codec):
        self.disk = SimulatedDisk()
        self.options = {"carrier": carrier, "batch_bytes": batch_bytes, "linger_ms": linger_ms}
        self.options["log_config"] = LogConfig(segment_bytes=120_000, preallocate_bytes=0, codec=codec)
        self.logs = [[] for _ in range(PARTITIONS)]
        self.receipts = []
        self.counter = 0
        self.open()

    def open(self):
        self.outbox = Outbox.open(
            Path("/outbox"),
            "orders",
            PARTITIONS,
            "billing",
            **outbox_arguments(filesystem=self.disk, **self.options),
        )
        self.taken = {}  # since this open: pair -> highest source offset

    def teardown(self):
        if hasattr(self, "outbox"):
            self.outbox.close()

    def value(self, size):
        self.counter += 1
        return b"%d" % self.counter + b"." * size

    def next_position(self, pair, gap):
        return StreamMetadata(*pair, self.taken.get(pair, -1) + gap)

    @rule(partition=st.integers(0, PARTITIONS - 1), size=SIZES, count=st.integers(1, 12))
    def append_own(self, partition, size, count):
        for _ in range(count):
            value = self.value(size)
            self.receipts.append((partition, len(self.logs[partition]), self.outbox.append(partition, value)))
            self.logs[partition].append((None, value))

    @rule(pair=PAIRS, size=SIZES, gap=st.integers(1, 4), time=st.none() | st.integers(0, 10**13))
    def append_upstream(self, pair, size, gap, time):
        metadata, value, partition = self.next_position(pair, gap), self.value(size), pair[1] % PARTITIONS
        receipt = self.outbox.append(partition, value, timestamp_ms=time, metadata=metadata)
        self.taken[pair] = metadata.offset
        self.receipts.append((partition, len(self.logs[partition]), receipt))
        self.logs[partition].append((metadata, value))

    @rule(pair=PAIRS, size=SIZES, count=st.integers(1, 30), gap=st.integers(1, 4), contiguous=st.booleans())
    def append_many_upstream(self, pair, size, count, gap, contiguous):
        first, partition = self.next_position(pair, gap), pair[1] % PARTITIONS
        step = 1 if contiguous else gap
        positions = [StreamMetadata(*pair, first.offset + n * step) for n in range(count)]
        values = [self.value(size) for _ in positions]
        receipt = self.outbox.append_many(partition, values, metadata=first if contiguous else positions)
        self.taken[pair] = positions[-1].offset
        self.receipts.append((partition, len(self.logs[partition]), receipt))
        self.logs[partition] += zip(positions, values, strict=True)

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 30), size=SIZES)
    def append_many_own(self, partition, count, size):
        values = [self.value(size) for _ in range(count)]
        self.receipts.append((partition, len(self.logs[partition]), self.outbox.append_many(partition, values)))
        self.logs[partition] += [(None, value) for value in values]

    @rule()
    def ask(self):
        """Some receipts, any time: their answers are the places in the list."""
        for partition, offset, receipt in self.receipts[::3]:
            assert receipt.result(30) == offset, f"partition {partition}"

    @rule(pair=PAIRS, count=st.integers(1, 5))
    def disk_full(self, pair, count):
        """A failed append changes nothing, and has to be repeated before later ones."""
        self.compare()
        partition, first = pair[1] % PARTITIONS, self.next_position(pair, 1)
        self.disk.capacity_bytes = 0
        lost = [
            self.outbox.append(partition, b"own"),
            self.outbox.append_many(partition, [b"lost"] * count, metadata=first),
        ]
        for receipt in lost:
            with pytest.raises(DeliveryFailed) as failed:
                receipt.result(30)
            assert not failed.value.may_be_delivered
        self.disk.capacity_bytes = None
        later = StreamMetadata(*pair, first.offset + 1)
        with pytest.raises(MetadataGap):
            self.outbox.append(partition, b"later", metadata=later)
        value = self.value(1)
        self.outbox.append(partition, value, metadata=first)
        self.taken[pair] = first.offset
        self.logs[partition].append((first, value))

    @rule()
    def close_and_open(self):
        self.outbox.close()
        for _, offset, receipt in self.receipts:
            assert receipt.result(0) == offset, "close decides every receipt"
        self.receipts = []
        self.open()
        self.compare()

    @rule()
    def compare(self):
        self.outbox.flush(30)
        highest = {}
        for partition, expected in enumerate(self.logs):
            held = list(self.outbox.log(partition).records(0))
            assert [record.value for record in held] == [value for _, value in expected]
            for offset, (record, (position, _)) in enumerate(zip(held, expected, strict=True)):
                carried = record.key if self.options["carrier"] == "key" else record.headers[-1][1]
                wanted = position or StreamMetadata(self.outbox.pid, partition, offset)
                assert StreamMetadata.unpack(carried) == wanted
                pair = (wanted.pid, wanted.partition)
                highest[pair] = max(highest.get(pair, -1), wanted.offset)
        found = {pair: self.outbox.last_metadata(*pair) for pair in highest}
        assert found == highest

    @invariant()
    def memory_is_accounted(self):
        if hasattr(self, "outbox"):
            assert 0 <= self.outbox.facts.budget.taken <= self.outbox.facts.budget.limit


OutboxModel.TestCase.settings = settings(
    max_examples=settings().max_examples * 2 // 5,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOutboxModel = OutboxModel.TestCase
