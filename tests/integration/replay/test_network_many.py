"""Many sessions at once on a real node: fair by bytes, flat in memory; and a model of what each must be given.

The model: what the log holds, offset to value. A reader keeps what it was given, drops from the cut on what it is told
to take back, and at its end has exactly what the model says for the range that it went over.
"""

import gc
import selectors
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pushrep.log import LogConfig
from pushrep.protocol import replay_messages as wire
from pushrep.protocol.error_codes import ErrorCode
from pushrep.replay import (
    TO_END,
    KeepingRefused,
    NodeAccess,
    ReplayEndReason,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplayTruncated,
)
from pushrep.replay.wire import NodeConnection
from tests.integration.replay.conftest import until

SESSIONS, BLOCK_BYTES = 200, 8 << 10


def rss_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Draining:
    """Subscribers of one log that read whatever comes, in one thread, and keep none of it."""

    def __init__(self, node, count, credit=1 << 40):
        self.connections = []
        for _ in range(count):
            connection = NodeConnection(node.address, NodeAccess())
            asked = wire.StartReplayRequest(recording_id=1, bound="gate", length_kind=wire.LengthKind.FOLLOW)
            _, started = connection.ask(asked, wire.StartReplayResponse)
            assert started.error_code is ErrorCode.NONE
            connection.ask(wire.AttachRequest(session_id=started.session_id, credit_bytes=credit), wire.AttachResponse)
            self.connections.append(connection)
        self.drained, self._is_over = 0, False
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def start(self):
        self._thread.start()

    def close(self):
        self._is_over = True
        if self._thread.is_alive():
            self._thread.join()
        for connection in self.connections:
            connection.close()

    def _drain(self):
        buffer = bytearray(1 << 16)
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                connection.socket.settimeout(0)
                selector.register(connection.socket, selectors.EVENT_READ)
            while not self._is_over:
                for key, _ in selector.select(0.05):
                    with suppress(BlockingIOError):
                        self.drained += key.fileobj.recv_into(buffer)


def test_200_sessions_at_once_share_fairly_and_cost_no_memory_however_slow_some_are(world):
    """One block per session and turn: when the first is half through, nobody is more than 20 % behind, by bytes."""
    state = {"gate": 0, "half": 1 << 60, "seen": None}

    def gate():  # asked in the server's thread, at every turn
        sessions = list(node._replays.sessions)
        if state["seen"] is None and max((one.bytes_sent for one in sessions), default=0) >= state["half"]:
            state["seen"] = sorted(one.bytes_sent for one in sessions)
        return state["gate"]

    limits = {"max_sessions": SESSIONS + 20, "block_bytes": BLOCK_BYTES, "heartbeat_ms": 60_000}
    node = world.node(replay=limits, replay_counters={"gate": gate}, config=LogConfig(preallocate_bytes=0))
    leader = world.leader(node)
    leader.fill(300, per_batch=4, size=1000)
    readers = Draining(node, SESSIONS)
    asleep = Draining(node, 20)  # they read nothing at all, and have all the credit in the world
    try:
        before = rss_bytes()
        size = sum(path.stat().st_size for path in Path(node.directory).glob("*/orders-0/*.log"))
        state["half"] = size // 2
        readers.start()
        state["gate"] = leader.end
        node._replays.changed(leader.tp)
        until(lambda: readers.drained >= SESSIONS * size)
        least, most = state["seen"][0], state["seen"][-1]
        assert most - least <= 0.2 * most, state["seen"]
        assert rss_bytes() - before < SESSIONS * size // 4
    finally:
        readers.close()
        asleep.close()
    until(lambda: node.replays().sessions_active == 0, "slots always come back")
    assert node.replays().ended == {ReplayEndReason.SUBSCRIBER_GONE: SESSIONS + 20}


class Reader:
    """A replay and what it has been given, by offset."""

    def __init__(self, replay, request):
        self.replay, self.request, self.first = replay, request, replay.position
        self.given, self.is_over = {}, False

    def take(self):
        """What is there now. An error comes once, and nothing after it."""
        if self.is_over:
            return
        try:
            for record in self.replay.poll():
                assert record.offset not in self.given, "a duplicate"
                self.given[record.offset] = record.value
        except ReplayTruncated as cut:
            self.given = {at: value for at, value in self.given.items() if at < cut.cut_offset}
            self._end()
        except ReplayFailed:
            self._end()
        if self.replay.end_reason is not None:
            self._end()

    def _end(self):
        self.is_over = True
        assert self.replay.poll() == [], "one error reaches the subscriber once"

    def check(self, model, history):
        """Who is over may have ended before a cut, and was given what stood there then."""
        for offset, value in self.given.items():
            assert value in history[offset]
            assert self.is_over or value == model[offset]
        if self.given and not isinstance(self.request.length, int):
            assert sorted(self.given) == list(range(self.first, max(self.given) + 1)), "a gap"


class Model:
    """A node, its one log, the leader, the readers; each step is drawn."""

    def __init__(self, world, chosen):
        self.world, self.chosen = world, chosen
        self.node = world.node(replay={"max_sessions": 6, "liveness_timeout_ms": 60_000})
        self.leader, self.client = world.leader(self.node), world.client(self.node)
        self.values, self.history, self.watermark, self.start, self.readers = [], {}, 0, 0, []
        self.is_led = True
        self.append()

    def append(self):
        if not self.is_led:
            return
        for _ in range(self.chosen.randint(1, 4)):
            values = [
                b"%d-%d" % (self.leader.epoch, self.chosen.randrange(1 << 30)) for _ in range(self.chosen.randint(1, 9))
            ]
            self.write(values)
        self.watermark = self.chosen.randint(self.watermark, len(self.values))
        self.leader.say(watermark=self.watermark)

    def write(self, values):
        self.note(len(self.values), values)
        self.leader.say(self.leader.batch(values), watermark=self.watermark)

    def note(self, offset, values):
        self.values = [*self.values[:offset], *values]
        for at, value in enumerate(values, offset):
            self.history.setdefault(at, set()).add(value)

    def cut(self):
        """Another leader that has less: at a batch's base, not below the watermark."""
        if not self.is_led or self.watermark >= len(self.values):
            return
        bases = [b.header.base_offset for b in self.log().batches(self.start) if b.header.base_offset >= self.watermark]
        if not bases:
            return
        offset = self.chosen.choice(bases)
        self.leader.watermark = self.watermark
        self.leader.epoch_before = self.log().leader_epochs.epoch_of(offset - 1) if offset else -1
        self.note(offset, [b"other"])
        self.leader.cut(offset)

    def log(self):
        return self.node._store.described(self.leader.tp).log

    def start_reader(self):
        position = self.chosen.choice([None, self.chosen.randint(0, len(self.values))])
        length = self.chosen.choice([TO_END, self.chosen.randint(0, 20), *2 * [ReplayRequest("x").length]])
        bound = self.chosen.choice(["stable", "high_watermark", "flushed", "written"])
        request = ReplayRequest("orders-0", position, length, bound)
        try:
            self.readers.append(Reader(self.client.replay(request), request))
        except ReplayRefused as refused:
            if refused.code not in {ErrorCode.MAX_REPLAYS, ErrorCode.INVALID_POSITION, ErrorCode.EMPTY_RECORDING}:
                raise

    def stop_reader(self):
        if self.readers:
            reader = self.chosen.choice(self.readers)
            how = self.chosen.choice([reader.replay.stop, reader.replay.close, self.vanish(reader), self.pause(reader)])
            how()

    def vanish(self, reader):
        def cut_the_line():
            if (attached := reader.replay._feed._attached) is not None:
                attached.connection.close()

        return cut_the_line

    def pause(self, reader):
        return self.chosen.choice([reader.replay.pause, reader.replay.resume])

    def stop_all(self):
        self.client.stop_all("orders-0")

    def restart_leader(self):
        if self.is_led:
            self.leader.stop()
            self.watermark, self.is_led = self.leader.watermark, False
        else:
            self.leader.come(self.node.address)
            self.is_led = True

    def restart_node(self):
        if self.is_led:
            self.restart_leader()
        self.node = self.world.again(self.node, replay={"max_sessions": 6, "liveness_timeout_ms": 60_000})
        self.restart_leader()

    def truncate(self):
        if self.is_led:
            with pytest.raises(KeepingRefused):
                self.client.truncate("orders-0", len(self.values))
            return
        end = self.client.truncate("orders-0", self.chosen.randint(self.start, len(self.values)))
        del self.values[end:]
        self.watermark = min(self.watermark, end)
        self.leader.end, self.leader.watermark = end, self.watermark
        epochs = self.log().leader_epochs
        self.leader.epoch_before = epochs.epoch_of(end - 1) if end > self.start else -1
        # Who leads a log that was cut by hand does so under a new epoch.
        self.leader.epoch, self.leader.start_offset = self.leader.epoch + 256, end

    def purge(self):
        with suppress(KeepingRefused):  # somebody reads there
            self.start = self.client.purge("orders-0", self.chosen.randint(self.start, len(self.values)))

    def take(self):
        for reader in self.chosen.sample(self.readers, len(self.readers) // 2):
            reader.take()

    STEPS = (
        append, append, append, cut, start_reader, start_reader, take, take, stop_reader, stop_all, restart_leader,
        restart_node, truncate, purge,
    )  # fmt: skip

    def finish(self):
        """Everybody reads on until nothing more can come, and is compared."""
        if not self.is_led:
            self.restart_leader()
        self.write([b"last"])  # who has it has heard of every cut
        self.leader.say(watermark=len(self.values))  # else a batch may lie across it, and waits
        left = list(self.readers)
        for reader in left:
            reader.replay.resume()

        def all_have_all():
            for reader in list(left):
                reader.take()
                if reader.is_over or self.has_all(reader):
                    reader.check(self.values, self.history)
                    reader.replay.close()  # who waits for its slot gets it
                    left.remove(reader)
            return not left

        until(all_have_all, f"{left} have not all")
        until(lambda: self.node.replays().sessions_active == 0, "slots always come back")

    def has_all(self, reader):
        """Behind the very last record, not only as far: a cut that it has not heard of may have left it there."""
        last = len(self.values) - 1
        return reader.replay.position == last + 1 and reader.given.get(last, b"last") == b"last"


def test_a_node_under_random_requests_stops_cuts_restarts_and_slow_readers_gives_each_what_the_model_says(
    world, torture, caplog
):
    for run in range(torture.count(2, 60)):
        chosen = torture.random("replay model", run)
        world.root = world.root / f"{run}"
        model = Model(world, chosen)
        for _ in range(torture.count(40, 150)):
            chosen.choice(Model.STEPS)(model)
        model.finish()
        world.opened.close()
    assert not [one for one in caplog.records if "failed" in one.message], "states only by the table"
