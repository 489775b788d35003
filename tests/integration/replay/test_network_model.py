"""A node under random requests, cuts, deletions, retention, restarts, slow and dead readers, compared with a model.

The model holds the offsets and values of each recording. A reader keeps what it gets, drops the records that a
truncation takes back, and in the end has exactly what the model holds for its range.
"""

from contextlib import suppress

import pytest

from pushrep.replay import (
    TO_END,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplayTruncated,
)
from pushrep.replay.node_connection import NodeConnection
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import QUICK, open_log, until


class Recorded:
    """One recording: what it holds, what stood at each offset ever, whether it was deleted."""

    def __init__(self):
        self.values, self.history, self.is_deleted = [], {}, False

    def note(self, offset, values):
        self.values = [*self.values[:offset], *values]
        for at, value in enumerate(values, offset):
            self.history.setdefault(at, set()).add(value)


class Reader:
    """A replay and what it has been given, by offset."""

    def __init__(self, replay, request, recorded):
        self.replay, self.request, self.first, self.recorded = replay, request, replay.position, recorded
        self.given, self.is_over, self.failed_by = {}, False, ErrorCode.NONE

    def take(self):
        """Take the records that have arrived. An error arrives once, and nothing after it."""
        if self.is_over:
            return
        try:
            for record in self.replay.poll():
                assert record.offset not in self.given, "a duplicate"
                self.given[record.offset] = record.value
        except ReplayTruncated as cut:
            self.given = {at: value for at, value in self.given.items() if at < cut.cut_offset}
            self._end()
        except ReplayFailed as failed:
            self.failed_by = failed.code
            self._end()
        if self.replay.end_reason is not None:
            self._end()

    def _end(self):
        self.is_over = True
        assert self.replay.poll() == [], "one error reaches the subscriber once"

    def check(self):
        """A reader that has ended may have ended before a cut, with the records that were there then."""
        assert self.recorded.is_deleted or self.failed_by is not ErrorCode.RECORDING_DELETED
        for offset, value in self.given.items():
            assert value in self.recorded.history[offset]
            assert self.is_over or value == self.recorded.values[offset]
        if self.given and not isinstance(self.request.length, int):
            assert sorted(self.given) == list(range(self.first, max(self.given) + 1)), "a gap"


class Model:
    """A node, its one log, the leader, the readers; each step is drawn."""

    def __init__(self, world, chosen, connections):
        self.world, self.chosen, self.connections = world, chosen, connections
        self.limits = {
            "max_sessions": chosen.choice([6, 40]), "connect_timeout_ms": 60_000, "liveness_timeout_ms": 60_000,
        }  # fmt: skip
        self.node = world.node(replay=self.limits)
        self.leader, self.client = world.leader(self.node), world.client(self.node)
        self.recorded, self.watermark, self.start, self.readers, self.dead = Recorded(), 0, 0, [], []
        self.is_led = True
        self.append()

    @property
    def values(self):
        return self.recorded.values

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
        self.recorded.note(len(self.values), values)
        self.leader.say(self.leader.batch(values), watermark=self.watermark)

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
        self.recorded.note(offset, [b"other"])
        self.leader.cut(offset)

    def log(self):
        return open_log(self.node, self.leader.tp)

    def start_reader(self):
        position = self.chosen.choice([None, self.chosen.randint(0, len(self.values))])
        length = self.chosen.choice([TO_END, self.chosen.randint(0, 20), *2 * [ReplayRequest("x").length]])
        bound = self.chosen.choice(["stable", "high_watermark", "flushed", "written"])
        request = ReplayRequest("orders-0", position, length, bound)
        try:
            self.readers.append(Reader(self.client.replay(request), request, self.recorded))
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
            if (connection := self.connections.pop(reader.replay.session_id, None)) is not None:
                connection.close()

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
        self.node = self.world.again(self.node, replay=self.limits)
        self.restart_leader()

    def truncate(self):
        if self.is_led:
            with pytest.raises(ReplayRefused):
                self.client.truncate("orders-0", len(self.values))
            return
        offset = self.chosen.randint(self.start, len(self.values))
        at = next(self.log().batches(offset, offset + 1), None) if offset < len(self.values) else None
        if at is not None and at.header.base_offset < self.start:
            with pytest.raises(ReplayRefused, match="below the log start"):
                self.client.truncate("orders-0", offset)
            return
        end = self.client.truncate("orders-0", offset)
        del self.values[end:]
        self.watermark = min(self.watermark, end)
        self.leader.end, self.leader.watermark = end, self.watermark
        epochs = self.log().leader_epochs
        self.leader.epoch_before = epochs.epoch_of(end - 1) if end > self.start else -1
        # Who leads a log that was cut by hand does so under a new epoch.
        self.leader.epoch, self.leader.start_offset = self.leader.epoch + 256, end

    def purge(self):
        with suppress(ReplayRefused):  # somebody reads there
            self.start = self.client.purge("orders-0", self.chosen.randint(self.start, len(self.values)))

    def retention(self):
        """The leader raises its log start. The node keeps records that a replay still reads; a later step raises it
        again.
        """
        if self.is_led:
            self.leader.say(watermark=self.watermark, log_start_offset=self.chosen.randint(self.start, self.watermark))
            self.start = self.log().log_start_offset

    def delete(self):
        """Another leader begins a new log under the same name at once; it is another recording."""
        if self.is_led:
            with pytest.raises(ReplayRefused):
                self.client.delete("orders-0", force=True)
            return
        running, force = len(self.node.replay_server.counters().sessions), self.chosen.random() < 0.5
        try:
            deletion = self.client.delete("orders-0", force=force)
        except ReplayRefused:
            if force or not running:
                raise
            return  # while replays run
        self.recorded.is_deleted = True
        deletion.wait()
        self.recorded, self.watermark, self.start = Recorded(), 0, 0
        self.leader.close()
        self.leader = self.world.leader(
            self.node, self.leader.tp, outbox=self.leader.outbox, epoch=self.leader.epoch + 256
        )
        self.is_led = True
        self.append()

    def start_dead_reader(self):
        """A reader that attaches to its session, gives all its credit, and never reads."""
        connection = NodeConnection(self.node.address, QUICK)
        recording = next(one.recording_id for one in self.client.recordings())
        started = connection.ask(wire.StartReplayRequest(recording_id=recording), wire.StartReplayResponse)
        if started.error_code is ErrorCode.NONE:
            connection.ask(wire.AttachRequest(session_id=started.session_id, credit_bytes=1 << 40), wire.AttachResponse)
        else:
            assert started.error_code is ErrorCode.MAX_REPLAYS
        self.dead.append(connection)

    def bury(self):
        while self.dead:
            self.dead.pop().close()

    def take(self):
        for reader in self.chosen.sample(self.readers, len(self.readers) // 2):
            reader.take()

    STEPS = (
        append, append, append, cut, start_reader, start_reader, take, take, stop_reader, stop_all, restart_leader,
        restart_node, truncate, purge, retention, delete, start_dead_reader, bury,
    )  # fmt: skip

    def finish(self):
        """All readers read until nothing more can come, and are compared with the model."""
        if not self.is_led:
            self.restart_leader()
        self.write([b"last"])  # who has it has heard of every cut
        self.leader.say(watermark=len(self.values))  # else a batch may lie across it, and waits
        self.bury()
        left = list(self.readers)
        for reader in left:
            reader.replay.resume()

        def all_have_all():
            for reader in list(left):
                reader.take()
                if reader.is_over or self.has_all(reader):
                    reader.check()
                    reader.replay.close()  # who waits for its slot gets it
                    left.remove(reader)
            return not left

        until(all_have_all, f"{left} have not all")
        until(lambda: len(self.node.replay_server.counters().sessions) == 0, "slots always come back")

    def has_all(self, reader):
        """Whether the reader is after the very last record; a cut whose notice is still on its way may have left it
        there.
        """
        if reader.recorded.is_deleted:
            return False  # it is told so
        last = len(self.values) - 1
        return reader.replay.position == last + 1 and reader.given.get(last, b"last") == b"last"


def test_a_node_under_random_requests_stops_cuts_deletions_and_restarts_gives_each_what_the_model_says(
    world, torture, caplog, connections
):
    for run in range(torture.count(2, 60)):
        chosen = torture.random("replay model", run)
        world.root = world.root / f"{run}"
        model = Model(world, chosen, connections)
        for _ in range(torture.count(40, 150)):
            chosen.choice(Model.STEPS)(model)
        model.finish()
        world.opened.close()
    assert not [one for one in caplog.records if "failed" in one.message], "states only by the table"
