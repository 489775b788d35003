"""Hostile bytes at every decoder: nothing but a ProtocolError, in bounded memory and time.

The CRC of a header stops most damage, so the deeper decoders are fed with frames whose CRC fits their damaged header.
"""

import time
import tracemalloc
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import CALLS, PLACE_OF, VERSIONS, encode, open_frame
from pushrep.wire.connection import ClientConnection, ServerConnection
from pushrep.wire.frames import PREFIX_BYTES, FrameKind, FrameLimits, FrameReader, ProtocolError, frame_head
from pushrep.wire.push_messages import ApiVersionsRequest, AppendRecordsPartition, AppendRecordsRequest, ListLogsRequest
from pushrep.wire.values import FileSlice, columns_of

LIMITS = FrameLimits(frame_bytes_max=1 << 17, header_bytes_max=1 << 16)
APPEND = PLACE_OF[AppendRecordsRequest]
PLACES = sorted(PLACE_OF.values())


def reader():
    return FrameReader(open_frame, LIMITS)


def samples():
    """A valid frame of every message, built as the golden files are."""
    folder = Path(__file__).parents[1] / "conformance" / "golden" / "protocol"
    for path in sorted(folder.glob("*.hex")):
        lines = path.read_text(encoding="ascii").splitlines()
        yield bytes.fromhex("".join(line.partition("#")[0] for line in lines))


FRAMES = list(samples())
HEADERS = {}
for _frame in FRAMES:
    _place = (int.from_bytes(_frame[4:6]), _frame[12])
    HEADERS[_place] = _frame[PREFIX_BYTES : PREFIX_BYTES + int.from_bytes(_frame[13:16])]
assert HEADERS.keys() == {(int(key), int(kind)) for key, kind in PLACES}


def survives(decoder, data):
    """Feed it; whatever comes is a message or a ProtocolError, and a dead decoder stays dead."""
    try:
        decoder.feed(data)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.feed(b"")
    else:
        if (failure := decoder.failure) is not None:
            with pytest.raises(type(failure)):
                decoder.feed(b"\0" * 40)


def damaged(draw, data):
    """`data` with bits flipped, bytes cut out or put in."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 3)):
            case 0 if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                data[at:at] = draw(st.binary(max_size=12))
            case 2:
                del data[at : at + draw(st.integers(1, 12))]
            case _:
                data[at : at + 10] = draw(
                    st.sampled_from([b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\x01" * 10, b"\0" * 10])
                )
    return bytes(data)


@given(data=st.binary(max_size=400))
def test_random_bytes(data):
    survives(reader(), data)
    survives(ServerConnection(limits=LIMITS), data)


@given(data=st.data())
def test_damaged_frames(data):
    survives(reader(), damaged(data.draw, data.draw(st.sampled_from(FRAMES))))


@given(data=st.data())
def test_damaged_headers_whose_crc_fits(data):
    place = data.draw(st.sampled_from(PLACES))
    header = damaged(data.draw, HEADERS[place])
    body = data.draw(st.integers(0, 100))
    survives(reader(), frame_head(place, VERSIONS[place[0]], 1, header, body) + bytes(body))


@given(place=st.sampled_from(PLACES), header=st.binary(max_size=200), body=st.binary(max_size=50))
def test_random_headers_whose_crc_fits(place, header, body):
    survives(reader(), frame_head(place, VERSIONS[place[0]], 1, header, len(body)) + body)


@given(
    api_key=st.integers(0, 40),
    version=st.integers(0, 3),
    kind=st.integers(0, 2),
    header=st.binary(max_size=50),
    correlation_id=st.integers(0, 2**32 - 1),
)
def test_any_call_in_any_version_at_both_ends(api_key, version, kind, header, correlation_id):
    frame = frame_head((api_key, kind), version, correlation_id, header, 0)
    survives(ServerConnection(limits=LIMITS), frame)
    client = ClientConnection(limits=LIMITS)
    client.ask(ApiVersionsRequest())
    survives(client, frame)


@given(data=st.data())
def test_every_flipped_bit_before_the_records_is_found(data):
    """The CRC covers the prefix and the header; the records after them have their own CRCs."""
    frame = data.draw(st.sampled_from(FRAMES))
    head_bytes = PREFIX_BYTES + int.from_bytes(frame[13:16])
    bit = data.draw(st.integers(0, 8 * head_bytes - 1))
    flipped = bytearray(frame)
    flipped[bit // 8] ^= 0x80 >> bit % 8
    decoder = reader()
    try:
        assert decoder.feed(bytes(flipped)) == []
    except ProtocolError:
        return
    assert decoder.held_bytes, "a size that grew: it still waits, within its limits, and has told nothing"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].name}-{place[1].name}")
def test_every_version_of_the_future_is_refused(place):
    newest = VERSIONS[place[0]]
    with pytest.raises(ProtocolError, match=f"is spoken in version {newest}"):
        reader().feed(frame_head(place, newest + 1, 1, b"", 0))


@pytest.mark.parametrize("size", [LIMITS.frame_bytes_max - 3, 1 << 31, (1 << 32) - 1])
def test_a_size_above_the_limit_is_refused_with_its_fourth_byte(size):
    decoder = reader()
    assert decoder.feed(size.to_bytes(4)[:3]) == []
    with pytest.raises(ProtocolError, match=f"a size of {size + 4} bytes exceeds frame_bytes_max"):
        decoder.feed(size.to_bytes(4)[3:])
    assert decoder.held_bytes == 0


def test_the_largest_frame_is_taken_and_one_byte_more_is_not():
    header = HEADERS[APPEND[0], APPEND[1]]
    room = LIMITS.frame_bytes_max - PREFIX_BYTES - len(header)
    frame = frame_head(APPEND, VERSIONS[APPEND[0]], 1, header, room)
    with pytest.raises(ProtocolError, match="the frame has"):
        reader().feed(frame)
    with pytest.raises(ProtocolError, match="frame_bytes_max"):
        reader().feed(frame_head(APPEND, VERSIONS[APPEND[0]], 1, header, room + 1))


def test_a_header_above_its_limit_is_refused():
    frame = frame_head(APPEND, 0, 1, b"\0" * (LIMITS.header_bytes_max + 1), 0)
    with pytest.raises(ProtocolError, match="header_bytes_max"):
        reader().feed(frame[:PREFIX_BYTES])


def test_a_frame_too_small_for_its_header_is_refused():
    frame = bytearray(frame_head(APPEND, 0, 1, b"\0" * 10, 0))
    frame[0:4] = (20).to_bytes(4)
    with pytest.raises(ProtocolError, match="no room"):
        reader().feed(bytes(frame[:PREFIX_BYTES]))


def test_records_that_the_header_does_not_tell_of_are_refused_before_they_come():
    frame = frame_head(PLACE_OF[ListLogsRequest], 0, 1, bytes(16), 1000)
    with pytest.raises(ProtocolError, match="the frame has 1000"):
        reader().feed(frame)


def test_bytes_behind_the_last_field_are_refused():
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        reader().feed(frame_head(PLACE_OF[ListLogsRequest], 0, 1, bytes(17), 0))


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"SSH-2.0-x\r\n"])
def test_other_protocols_are_refused_at_once(hello):
    with pytest.raises(ProtocolError):
        reader().feed(hello)


def append_frame_head(records_bytes):
    """The head of a frame whose only partition tells of that many bytes."""
    partition = AppendRecordsPartition(
        tp=TopicIdPartition(UUID(int=1), "orders", 0),
        leader_epoch=0,
        replica_epoch=0,
        session_id=0,
        append_offset=0,
        previous_epoch=-1,
        epoch_start_offset=0,
        high_watermark=0,
        log_start_offset=0,
        records=(FileSlice(None, 0, records_bytes),),
    )
    return encode(AppendRecordsRequest(partitions=(partition,)), 1)[0]


def test_a_claim_costs_no_memory():
    """A valid header announces 64 MiB: memory grows with the received bytes, not with the announced ones."""
    decoder = FrameReader(open_frame, FrameLimits())
    tracemalloc.start()
    try:
        decoder.feed(append_frame_head(60 << 20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    sent = 0
    for _ in range(20):
        sent += len(piece := bytes(50_000))
        decoder.feed(piece)
        assert 0 <= decoder.held_bytes <= max(4 * sent, 1 << 16), f"{decoder.held_bytes} held of {sent} sent"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].name}-{place[1].name}")
def test_counts_that_no_header_could_hold_end_quickly(place):
    """The count of each array is replaced by 2**62, at each place where a count can be."""
    header = HEADERS[place]
    began_s = time.process_time()  # a machine that stands still is no slow decoder
    for at in range(len(header)):
        survives(
            reader(),
            frame_head(place, VERSIONS[place[0]], 1, header[:at] + b"\xfe" + b"\xff" * 8 + b"\x01" + header[at:], 0),
        )
    assert time.process_time() - began_s < 20, "decoding must end with the bytes, whatever they count"


def test_the_fullest_header_is_decoded_in_bounded_memory():
    """As many of the smallest entries as a header of the largest allowed size can hold."""
    limits = FrameLimits()
    numbers = bytes(len(columns_of(AppendRecordsPartition)))  # the partition's, and one of each other field
    entry = bytes(16 - 1) + b"\1" + b"\2a" + numbers  # its id, the topic "a"
    count = (limits.header_bytes_max - 20) // len(entry)
    zigzag, counted = count << 1, bytearray()
    while zigzag >= 0x80:
        counted.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    header = bytes(counted) + bytes([zigzag]) + entry * count + b"\0"
    tracemalloc.start()
    try:
        (frame,) = FrameReader(open_frame, limits).feed(frame_head(APPEND, 0, 1, header, 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(frame.message.partitions) == count
    assert peak < 64 * limits.header_bytes_max, f"{peak} bytes for a header of {len(header)}"


def test_both_kinds_of_every_call_are_in_the_fuzz():
    assert {kind for call in CALLS.values() for kind in call} == set(FrameKind)


def test_long_fuzz_of_both_ends(torture):
    """A stream of valid and damaged frames, cut at random, at a server, at a client and at the bare reader."""
    random = torture.random("protocol fuzz")
    for _ in range(torture.count(1_500, 1_000_000)):
        stream = bytearray(b"".join(random.choices(FRAMES, k=random.randrange(1, 4))))
        for _ in range(random.randrange(4)):
            at = random.randrange(len(stream))
            stream[at : at + random.randrange(4)] = random.randbytes(random.randrange(4))
            if not stream:
                stream = bytearray(b"\0")
        client = ClientConnection(limits=LIMITS)
        client.ask(ApiVersionsRequest())
        cut = random.randrange(len(stream) + 1)
        for decoder in (reader(), ServerConnection(limits=LIMITS), client):
            for piece in (stream[:cut], stream[cut:]):
                if decoder.failure is None:
                    survives(decoder, bytes(piece))
