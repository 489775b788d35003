"""`recording replicate` between two nodes that are killed with SIGKILL, over a link that is cut, of a source that is
cut and grown anew: the copy equals its source byte for byte up to its end, or says TRUNCATED and is part of what that
had.
"""

import random
from contextlib import ExitStack, suppress

import pytest

from pushrep.log import SegmentLog
from pushrep.outbox.control import CallRefused, NobodyAnswers, ask
from pushrep.replay import ReplayClient
from pushrep.replay.catalogue import read_catalogue
from pushrep.replicate.sockets import Address
from tests.crash.test_failover_kill import Proxy
from tests.crash.test_outbox_replicas_kill import Process
from tests.integration.replay.conftest import QUICK, Leader, until
from tests.ports import reserve

# `pushrep replica serve`, with small files and little patience: a wait of seconds would find nothing more.
NODE = """
import sys, threading
from pathlib import Path
from pushrep.log import LogConfig
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replay import NodeAccess
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address

directory, port = sys.argv[1:]
ReplicaNode._access_others = lambda _: NodeAccess(
    backoff_min_ms=1, backoff_max_ms=20, reconnect_for_ms=200, connect_timeout_ms=2000, silence_max_ms=2000,
)
small = LogConfig(segment_bytes=4096, preallocate_bytes=0)
settings = NodeSettings(address=Address("127.0.0.1", int(port)), allow=frozenset({"any"}), log_config=small)
with ReplicaNode(Path(directory), settings) as node, HandoverSocket(node):
    print("listening", flush=True)
    threading.Event().wait()
"""
STEPS = ("grow", "grow", "cut link", "kill source", "kill target", "kill both", "truncate", "wait")


class Node:
    """One that is killed and started again at its address."""

    def __init__(self, directory, stack):
        self.directory, self.process = directory, None
        self.port = stack.enter_context(reserve()).getsockname()[1]
        self.address = Address("127.0.0.1", self.port)
        self.start()
        stack.callback(lambda: self.process.end(kill=True))

    def start(self):
        self.process = Process("-c", NODE, str(self.directory), str(self.port))
        self.process.wait_for("listening")

    def kill(self):
        self.process.end(kill=True)

    def log(self, leader):
        return SegmentLog.open_reader(self.directory / str(leader.outbox) / str(leader.tp), isolation="written")

    def held(self, leader):
        """The bytes of every batch of the log at this node."""
        with self.log(leader) as log:
            return b"".join(bytes(batch.data) for batch in log.batches(log.bounds().start))


class Round:
    """A source, its leader, a link, and a target that copies."""

    def __init__(self, directory, seed, stack):
        self.chance, self.seed = random.Random(seed), seed
        self.source, self.target = (Node(directory / name, stack) for name in ("source", "target"))
        self.leader = Leader(self.source.address)
        stack.callback(self.leader.close)
        self.epochs, self.had = [(self.leader.epoch, 0)], []
        self.link = Proxy()
        stack.callback(self.link.close)
        self.link.port = self.source.port
        self.grow()
        self.client = stack.enter_context(ReplayClient(str(self.source.address), node=QUICK))
        (recording,) = self.client.recordings()
        origin = {"address": self.link.address, "recording_id": recording.recording_id, "follows": True}
        self.copy = ask(self.target.directory, "replicate", origin)["recording_id"]

    def grow(self):
        self.leader.fill(self.leader.end + self.chance.choice([1, 20, 60, 2000]))

    def step(self):
        step = self.chance.choice(STEPS)
        if step == "grow":
            self.grow()
        elif step == "cut link":
            self.link.cut()
        elif step == "truncate" and self.leader.end > 1:
            self.truncate()
        elif step == "wait":
            self.wait_until_even()
        for node in (self.source, self.target):
            if step in {"kill both", f"kill {node.directory.name}"}:
                node.kill()
        for node in (self.source, self.target):
            if node.process.process.poll() is not None:
                node.start()
                if node is self.source:
                    self.leader.come(node.address)

    def truncate(self):
        """Cut the source, and let it grow again under a higher epoch, perhaps over the copy's end."""
        leader = self.leader
        self.had.append(self.source.held(leader))
        leader.stop()
        end = self.client.truncate(self.client.recordings()[0].recording_id, self.chance.randint(1, leader.end - 1))
        self.epochs = [one for one in self.epochs if one[1] < end]
        leader.epoch_before = self.epochs[-1][0] if self.epochs else -1
        leader.epoch += 256
        self.epochs.append((leader.epoch, end))
        leader.end = leader.start_offset = leader.watermark = end
        leader.come(self.source.address)
        leader.fill(end + self.chance.choice([1, 20, 500]))

    def end(self):
        """Why the copy is over; None while it runs."""
        with suppress(CallRefused, NobodyAnswers):
            return ask(self.target.directory, "copy", {"recording_id": self.copy})["end"]
        entry = next(one for one in read_catalogue(self.target.directory) if one.recording_id == self.copy)
        return "over before" if entry.origin.is_done else None

    def wait_until_even(self):
        def is_even():
            with self.source.log(self.leader) as source, self.target.log(self.leader) as target:
                return self.end() or target.ends().end == source.ends().end

        until(is_even, f"seed {self.seed}: the copy stands still")

    def check(self):
        self.wait_until_even()
        end, copy, source = self.end(), self.target.held(self.leader), self.source.held(self.leader)
        if end is None:
            assert copy == source, self.seed
        else:
            assert end in {"TRUNCATED", "over before"}, (self.seed, end)
            assert self.had, f"seed {self.seed}: nothing was cut"
            assert any(one.startswith(copy) for one in self.had), self.seed


@pytest.mark.slow
def test_a_copy_equals_its_source_or_says_truncated_whoever_is_killed(tmp_path, torture):
    chance = torture.random("replicating")
    for number in range(torture.count(2, 200)):
        seed = chance.randrange(1 << 32)
        with ExitStack() as stack:
            one = Round(tmp_path / str(number), seed, stack)
            for _ in range(8):
                one.step()
                if one.end():
                    break
            one.check()
