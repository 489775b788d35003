"""Outboxes of one process share their threads: twenty have no more than one, and each closes for itself."""

import os
import threading
from collections import Counter

import pytest

from pushrep.log import LogConfig
from pushrep.outbox import Outbox
from tests.integration.outboxes import open_outbox, wait_for_all
from tests.support.forks import code_in_fork
from tests.unit.gated_disk import until

WAIT_S = 60
FEW_FILES = LogConfig(preallocate_bytes=0, open_files_max=8)


def own_threads():
    """Those of outboxes in this process, the node's left out.

    No outbox here has a topic: a thread that asks Kafka is an earlier test's, whose broker was away.
    """
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("pushrep-") and not thread.name.startswith(("pushrep-node", "pushrep-kafka"))
    )


def in_use(outbox):
    assert outbox.append(0, b"x").result(WAIT_S) == outbox.log(0).log_end_offset - 1
    wait_for_all(outbox)
    until(lambda: not any("sessions" in name or "connect" in name for name in own_threads()), "all sessions have begun")


@pytest.fixture
def twenty(world):
    world.node(1)
    opened = [open_outbox(world, 1, directory=world.root / f"outbox-{n}", partitions=4) for n in range(1)]
    in_use(opened[0])
    yield opened
    for outbox in opened:
        outbox.close()


def test_twenty_outboxes_have_the_threads_of_one_and_close_one_by_one(world, twenty):
    alone = own_threads()
    twenty += [open_outbox(world, 1, directory=world.root / f"outbox-{n}", partitions=4) for n in range(1, 20)]
    receipts = [outbox.append(partition, b"y") for outbox in twenty for partition in range(4)]
    for receipt in receipts:
        receipt.result(WAIT_S)
    for outbox in twenty:
        in_use(outbox)
    now = own_threads()
    disk = [name for name in now if name.startswith("pushrep-disk-")]
    assert len(disk) <= 16 + 4, "as many syncs as run at once, however many outboxes"
    assert [name for name in now if name not in disk] == [name for name in alone if "-disk-" not in name]
    for outbox in twenty[1:]:
        outbox.close()
    in_use(twenty[0])
    twenty[0].close()
    world.nodes[1].stop()  # which looks at its connections in the same thread
    ours = ("pushrep-push", "pushrep-linger", "pushrep-ticks", "pushrep-control")  # the node of this process has others
    assert not [name for name in own_threads() if name.startswith(ours)], "all end with the last"


def test_a_fork_beside_open_outboxes_opens_one_of_its_own(world, twenty):
    parent = twenty[0]

    def child():
        with Outbox.open(world.root / "forked", "orders", 1, "billing") as outbox:
            assert outbox.append(0, b"x").result(WAIT_S) == 0

    assert code_in_fork(child) == 0
    in_use(parent)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_idle_partitions_take_neither_threads_nor_descriptors(world, torture):
    """Threads and descriptors of leader and node together, which are in this process."""
    count = 5000 if torture.is_long else 96
    world.node(1, log_config=FEW_FILES)
    found = []
    for partitions in (8, count):
        directory = world.root / f"outbox-{partitions}"
        with open_outbox(
            world, 1, directory=directory, partitions=partitions, log_config=FEW_FILES, open_timeout_s=600
        ) as outbox:
            receipts = [outbox.append(partition, b"x") for partition in range(partitions)]
            assert [receipt.result(600) for receipt in receipts] == [0] * partitions
            in_use(outbox)
            found.append((descriptors(), [name for name in own_threads() if "-disk-" not in name]))
    (few, threads_of_few), (many, threads_of_many) = found
    # No more: with few, a thread that asked for the test before may not have ended yet.
    assert not Counter(threads_of_many) - Counter(threads_of_few)
    kept = FEW_FILES.open_files_max + 4  # the node goes on with the first outbox: its files, lock and published ends
    assert many <= few + kept, "open_files_max for each directory of logs, and nothing a partition"


def test_many_leaders_on_one_node_have_a_connection_each(world, torture):
    count = 200 if torture.is_long else 10
    world.node(1)
    node, opened = world.nodes[1], []
    try:
        for n in range(count):
            opened += [open_outbox(world, 1, directory=world.root / f"leader-{n}")]
        receipts = [outbox.append(0, b"x") for outbox in opened]
        assert [receipt.result(WAIT_S) for receipt in receipts] == [0] * count
        for outbox in opened:
            in_use(outbox)
        until(lambda: len(node.connections) == count, "one connection for each leader")
        peers = [thread for thread in threading.enumerate() if thread.name == "pushrep-node-peer"]
        assert len(peers) == count
    finally:
        for outbox in opened:
            outbox.close()
    until(lambda: len(node.connections) == 0, "they hang up")
