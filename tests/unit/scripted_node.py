"""A node that answers by a script, in memory and at once: a `Network` for tests of who connects to it.

    node = ScriptedNode(clock)          node.connections: what comes of each next connection, "refused" without an entry
    node.connections.append({ApiKey.API_VERSIONS: None, ApiKey.ATTACH: "hangs up", ...})

Each request is answered by the entry of its call: a response, one response after the other in a list, or one of BREAKS.
"""

from collections import deque

from pushrep.env.network import Address
from pushrep.wire.calls import ApiKey
from pushrep.wire.connection import ClientEvent, ServerConnection

HERE = Address("node", 7400)
BREAKS = ("refused", "hangs up", "is reset", "says nothing", "says rubbish")
"""What a connection may do instead of answering."""


class Line:
    """The client's end of one connection. answers: by request, what the node answers; or one of BREAKS."""

    def __init__(self, node, answers, wait_s):
        self.node, self.answers, self.protocol, self.wait_s = node, answers, ServerConnection(), wait_s
        self.coming, self.broken, self.is_open = bytearray(), None, True
        self.meanwhile = lambda: None  # what another thread does while this one receives
        self.behind = []  # events that come right behind the answer to Attach
        self.waits_s = []  # how long each event of the client could wait for the network
        self.call = None

    def setsockopt(self, *_):
        pass

    def settimeout(self, wait_s):
        self.wait_s = wait_s

    def close(self):
        self.is_open = False

    def send(self, data):
        assert self.is_open, "it is closed"
        if self.broken == "is reset":
            raise ConnectionResetError("reset")
        for call in self.protocol.feed(bytes(data)):
            self.node.asked.append(call.message if isinstance(call, ClientEvent) else call.request)
            if isinstance(call, ClientEvent):
                self.waits_s.append(self.wait_s)
            else:
                self._answer(call)
        return len(data)

    def _answer(self, call):
        answer = self.answers.get(call.api_key)
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if answer in BREAKS:
            self.breaks(answer)
        elif call.api_key is ApiKey.API_VERSIONS:
            self._put(self.protocol.answer_versions(call))
        else:
            self.call = call
            self._put(self.protocol.answer(call, answer))
            for event in self.behind if call.api_key is ApiKey.ATTACH else ():
                self.gives(event)

    def gives(self, event):
        """An event of the replay."""
        self._put(self.protocol.event(self.call, event))

    def breaks(self, how):
        self.broken = how
        if how == "says rubbish":
            self.coming += b"HTTP/1.1 400 Bad Request\r\n\r\n"

    def _put(self, parts):
        self.coming += b"".join(map(bytes, parts))

    def recv_into(self, buffer):
        assert self.is_open, "it is closed"
        self.meanwhile()
        if self.coming:
            count = min(len(buffer), len(self.coming))
            buffer[:count] = self.coming[:count]
            del self.coming[:count]
            return count
        if self.broken == "hangs up":
            return 0
        if self.broken == "is reset":
            raise ConnectionResetError("reset")
        if self.wait_s == 0:
            raise BlockingIOError
        assert self.wait_s is not None, "it would wait for ever"
        raise TimeoutError("timed out")


class Waits:
    """A poller on which nothing ever comes: time passes."""

    def __init__(self, clock):
        self.clock = clock

    def select(self, timeout_s):
        self.clock.advance(max(1, round(1000 * timeout_s)))
        return []

    def register(self, *_):
        pass

    unregister = register

    def wake(self):
        pass

    close = wake


class ScriptedNode:
    """A network with one node. connections: what comes of each next one; without an entry it is refused."""

    def __init__(self, clock):
        self.clock, self.connections, self.lines, self.asked, self.tried_ms = clock, deque(), [], [], []

    def connect(self, address, timeout_s):
        assert address == HERE
        self.tried_ms.append(self.clock.monotonic_ms())
        answers = self.connections.popleft() if self.connections else "refused"
        if answers == "refused":
            raise ConnectionRefusedError("refused")
        self.lines.append(Line(self, answers, timeout_s))
        return self.lines[-1]

    def poller(self):
        return Waits(self.clock)

    @property
    def line(self):
        return self.lines[-1]
