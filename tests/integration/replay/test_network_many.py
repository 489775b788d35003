"""Many sessions at once on a real node: fair by bytes, flat in memory."""

import gc
import selectors
import threading
from contextlib import suppress
from pathlib import Path

from pushrep.log import LogConfig
from pushrep.replay import ReplayEndReason
from pushrep.replay.node_connection import NodeConnection
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import QUICK, until

SESSIONS, BLOCK_BYTES = 200, 8 << 10


def rss_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Draining:
    """Subscribers of one log that read everything, in one thread, and keep no records."""

    def __init__(self, node, count, credit=1 << 40):
        self.connections = []
        for _ in range(count):
            connection = NodeConnection(node.address, QUICK)
            asked = wire.StartReplayRequest(recording_id=1, bound="gate", length_kind=wire.LengthKind.FOLLOW)
            started = connection.ask(asked, wire.StartReplayResponse)
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
    """Each session sends one block a turn: when the first is half done, no session is more than 20 % behind, by
    bytes.
    """
    state = {"gate": 0, "half": 1 << 60, "seen": None}

    def gate():  # asked in the server's thread, at every turn
        sessions = list(node.replay_server.sessions)
        if state["seen"] is None and max((one.bytes_sent for one in sessions), default=0) >= state["half"]:
            state["seen"] = sorted(one.bytes_sent for one in sessions)
        return state["gate"]

    limits = {"max_sessions": SESSIONS + 20, "block_bytes": BLOCK_BYTES, "heartbeat_ms": 60_000}
    limits["liveness_timeout_ms"] = 600_000  # those that are asleep are not given up meanwhile
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
        node.replay_server.changed(leader.tp)
        until(lambda: readers.drained >= SESSIONS * size)
        least, most = state["seen"][0], state["seen"][-1]
        assert most - least <= 0.2 * most, state["seen"]
        assert rss_bytes() - before < SESSIONS * size // 4
    finally:
        readers.close()
        asleep.close()
    until(lambda: len(node.replay_server.counters().sessions) == 0, "slots always come back")
    assert node.replay_server.counters().ended == {ReplayEndReason.SUBSCRIBER_GONE: SESSIONS + 20}
