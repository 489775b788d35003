"""Memory that is reused: records do not change while a caller has a view of them."""

import os

import pytest

from pushrep.wire.connection import ClientConnection, ServerConnection
from pushrep.wire.frames import SPARE_BYTES, FrameLimits, FrameReader, OpenedFrame, SpareBuffers, frame_head
from pushrep.wire.push_messages import ApiVersionsRequest
from tests.unit.test_wire_connections import append_request, joined

LARGE = 300_000


def received(connection, data, size=1 << 30):
    """The records completed by `data`, which is written to the connection's buffer, at most `size` bytes at a time."""
    found, at = [], 0
    while at < len(data):
        room = connection.get_buffer()
        count = min(len(room), len(data) - at, size)
        room[:count] = data[at : at + count]
        found += connection.buffer_updated(count)
        at += count
    return [call.request.partitions[0].records[0] for call in found]


class Spares(SpareBuffers):
    """Counts what comes back."""

    given_back = 0

    def give_back(self, buffer):
        self.given_back += 1
        super().give_back(buffer)


@pytest.fixture
def spares():
    return Spares()


@pytest.fixture
def server(spares):
    return ServerConnection(memory=spares)


@pytest.fixture
def frame_of():
    client, other = ClientConnection(), ServerConnection()
    (call,) = other.feed(joined(client.ask(ApiVersionsRequest())[1]))
    client.feed(joined(other.answer_versions(call)))
    return lambda records: joined(client.ask(append_request(records))[1])


@pytest.mark.parametrize("piece", [1 << 30, 100_000, 511])
def test_every_frame_holds_what_was_sent(server, frame_of, piece):
    sent = [os.urandom(size) for size in (LARGE, 10, LARGE, 3 * LARGE, 70_000, SPARE_BYTES, SPARE_BYTES + 1, 5, LARGE)]
    for records in sent:
        (found,) = received(server, frame_of(records), piece)
        assert found == records
        assert found.readonly
        server.done()


def test_before_done_every_frame_keeps_its_own(server, frame_of, spares):
    sent = [os.urandom(LARGE) for _ in range(6)]
    found = [records for data in sent for records in received(server, frame_of(data))]
    assert found == sent
    server.done()
    assert spares.given_back < len(sent), "who never says so gets new memory each time, and holds none"


def test_after_done_the_memory_is_used_again(server, frame_of, spares):
    (first,) = received(server, frame_of(b"a" * LARGE))
    server.done()
    another = ServerConnection(memory=spares)
    (second,) = received(another, frame_of(b"b" * LARGE))
    assert second == first == b"b" * LARGE, "by whichever connection comes first"


def test_a_body_that_is_claimed_and_not_sent_holds_only_what_came(spares):
    def opened(prefix, _header):
        return OpenedFrame(prefix.body_bytes, lambda body: body)

    reader, head = FrameReader(opened, FrameLimits(), spares), frame_head((1, 0), 0, 7, b"header", LARGE)
    assert received(reader, head + bytes(900)) == []
    assert 900 <= reader.held_bytes < 1000


def test_few_are_kept(spares):
    given = [spares.acquire() for _ in range(20)]
    for buffer in given:
        spares.give_back(buffer)
    again = {id(spares.acquire()) for _ in given}
    assert 0 < len(again & set(map(id, given))) < 10
