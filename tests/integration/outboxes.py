"""Helpers for tests of an Outbox with nodes: open one with the nodes of a `world`, wait for a condition."""

import threading

import pytest

from pushrep import Outbox
from pushrep.log import LogConfig
from pushrep.replicate.settings import PushSettings
from tests.support.outbox_arguments import outbox_arguments

WAIT_S = 60
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1)
SMALL = LogConfig(preallocate_bytes=0)


def open_outbox(world, *indexes, **settings):
    """Open an outbox with these nodes as replicas; a node that does not run keeps its address."""
    addresses = [str(world.nodes[index].address) for index in indexes]
    given = {"partitions": 1, "log_config": SMALL, "push": QUICK, "replica_lag_max_ms": 300, "open_timeout_s": WAIT_S}
    given |= settings
    given = {"directory": world.root / "outbox", "topic": "orders", "producer": "billing", **given}
    return Outbox.open(**outbox_arguments(replicas=addresses, **given))


def wait_until(what, why, every_s=0.005):
    """every_s: longer for a question that costs a client or a page."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / every_s)):
        if what():
            return
        pause.wait(every_s)
    pytest.fail(f"never so: {why}")


def wait_for_all(outbox, *addresses):
    """Wait until these replicas (without any: all) hold everything and are in sync in every partition."""
    wanted = [str(address) for address in addresses] or list(outbox.lag())

    def is_so():
        lag = outbox.lag()
        return all(lag[one].records == 0 and lag[one].in_sync == lag[one].partitions for one in wanted)

    wait_until(is_so, f"caught up: {outbox.lag()}")
