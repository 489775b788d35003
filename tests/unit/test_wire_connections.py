"""Responses are matched with requests and events with calls, and a peer that breaks the order gets an error."""

from uuid import UUID

import pytest

from pushrep.errors import BadArgument
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import VERSIONS, ApiKey, encode, open_frame, refusal, versions_answer
from pushrep.wire.connection import (
    CORRELATION_IDS,
    Call,
    CallAnswer,
    ClientConnection,
    ClientEvent,
    PeerEvent,
    ServerConnection,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind, FrameLimits, FrameReader, ProtocolError, frame_head
from pushrep.wire.push_messages import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    AppendRecordsPartition,
    AppendRecordsRequest,
    AppendRecordsResponse,
    AppendRecordsResult,
    ListLogsRequest,
    ListLogsResponse,
)
from pushrep.wire.replay_messages import (
    AttachRequest,
    AttachResponse,
    Credit,
    DeleteDone,
    DeleteRequest,
    DeleteResponse,
    ReplayData,
    ReplayEnd,
    ReplayEndReason,
    StopReplayRequest,
)

TP = TopicIdPartition(UUID(int=1), "orders", 3)
BATCH = b"batch" * 1000


def joined(parts):
    return b"".join(bytes(part) for part in parts)


def append_request(*records):
    partition = AppendRecordsPartition(
        tp=TP,
        leader_epoch=256,
        replica_epoch=7,
        session_id=9,
        append_offset=100,
        previous_epoch=256,
        epoch_start_offset=50,
        high_watermark=90,
        log_start_offset=0,
        records=records,
    )
    return AppendRecordsRequest(partitions=(partition,))


@pytest.fixture
def pair():
    """A client and a server that have agreed on their versions."""
    client, server = ClientConnection(), ServerConnection()
    _, parts = client.ask(ApiVersionsRequest())
    (call,) = server.feed(joined(parts))
    (answer,) = client.feed(joined(server.answer_versions(call)))
    assert answer.message.error_code is ErrorCode.NONE
    return client, server


def asked(client, server, request):
    correlation_id, parts = client.ask(request)
    (call,) = server.feed(joined(parts))
    assert isinstance(call, Call)
    assert call.correlation_id == correlation_id
    return call


def test_a_request_and_its_answer(pair):
    client, server = pair
    call = asked(client, server, append_request(BATCH, b"tail"))
    assert call.request.partitions[0].records == (BATCH + b"tail",)
    response = AppendRecordsResponse(results=(AppendRecordsResult(log_end_offset=101),))
    (answer,) = client.feed(joined(server.answer(call, response)))
    assert answer == CallAnswer(call.correlation_id, response)


def test_the_batches_are_not_copied_on_the_way_out_and_not_in(pair):
    client, server = pair
    view = memoryview(bytearray(BATCH))
    _, parts = client.ask(append_request(BATCH, view))
    assert parts[1] is BATCH
    assert parts[2] is view
    stream = joined(parts)
    (call,) = server.feed(stream)
    (records,) = call.request.partitions[0].records
    assert records.obj is stream, "records of a whole frame point into what was read"
    assert records.readonly


def test_answers_come_in_any_order(pair):
    client, server = pair
    first, second = (asked(client, server, ListLogsRequest(outbox_id=UUID(int=n))) for n in (1, 2))
    refused = refusal(ApiKey.LIST_LOGS, ErrorCode.UNSUPPORTED)
    answers = client.feed(joined(server.answer(second, ListLogsResponse())) + joined(server.answer(first, refused)))
    assert [answer.correlation_id for answer in answers] == [second.correlation_id, first.correlation_id]
    assert answers[1].message.error_code is ErrorCode.UNSUPPORTED


def test_an_answer_comes_once(pair):
    client, server = pair
    call = asked(client, server, ListLogsRequest())
    parts = server.answer(call, ListLogsResponse())
    with pytest.raises(BadArgument, match="answered already"):
        server.answer(call, ListLogsResponse())
    assert len(client.feed(joined(parts) * 2)) == 1, "the good answer before the bad one is not lost"
    assert "was answered before" in client.failure.reason
    with pytest.raises(ProtocolError, match="was answered before"):
        client.feed(b"")


def test_an_answer_of_another_call_is_refused(pair):
    client, server = pair
    call = asked(client, server, ListLogsRequest())
    with pytest.raises(BadArgument, match="does not answer"):
        server.answer(call, AttachResponse())
    with pytest.raises(ProtocolError, match="asked was"):
        client.feed(joined(encode(AttachResponse(), call.correlation_id)))


def test_nothing_is_asked_before_the_versions():
    with pytest.raises(BadArgument, match="asked first"):
        ClientConnection().ask(ListLogsRequest())


def test_an_event_is_not_asked(pair):
    client, _ = pair
    with pytest.raises(BadArgument, match="Credit is no request"):
        client.ask(Credit(session_id=1, bytes=1))


def test_a_server_refuses_who_asks_on_regardless(monkeypatch):
    monkeypatch.setattr("pushrep.wire.connection.UNANSWERED_MAX", 2)
    server = ServerConnection()
    stream = b"".join(joined(encode(ListLogsRequest(), number)) for number in range(3))
    assert len(server.feed(stream)) == 2
    assert "2 requests are unanswered" in server.failure.reason


def test_a_number_in_use_is_refused():
    server = ServerConnection()
    stream = joined(encode(ListLogsRequest(), 5))
    server.feed(stream)
    with pytest.raises(ProtocolError, match="in use"):
        server.feed(stream)


def replaying(pair, credit_bytes=1000):
    client, server = pair
    call = asked(client, server, AttachRequest(session_id=77, credit_bytes=credit_bytes))
    client.feed(joined(server.answer(call, AttachResponse())))
    return client, server, call


def test_a_replay_streams_under_its_attach(pair):
    client, server, call = replaying(pair)
    data = ReplayData(session_id=77, start_offset=0, end_offset=9, tip_offset=20, records=(BATCH,))
    end = ReplayEnd(session_id=77, reason=ReplayEndReason.LIMIT_REACHED, offset=9)
    stream = joined(server.event(call, data)) + joined(server.event(call, data)) + joined(server.event(call, end))
    assert client.feed(stream) == [PeerEvent(call.correlation_id, data)] * 2 + [PeerEvent(call.correlation_id, end)]
    with pytest.raises(BadArgument, match="over"):
        server.event(call, data)
    with pytest.raises(ProtocolError, match="no call waits for events"):
        client.feed(joined(encode(data, call.correlation_id)))


def test_an_answer_and_its_first_event_may_come_together(pair):
    client, server = pair
    call = asked(client, server, AttachRequest(session_id=77, credit_bytes=1))
    beat = ReplayData(session_id=77, start_offset=0, end_offset=0, tip_offset=0)
    stream = joined(server.answer(call, AttachResponse())) + joined(server.event(call, beat))
    assert [type(heard) for heard in client.feed(stream)] == [CallAnswer, PeerEvent]


def test_credit_goes_to_the_server_and_may_come_too_late(pair):
    client, server, call = replaying(pair)
    credit = Credit(session_id=77, bytes=4096)
    late = joined(client.event_parts(call.correlation_id, credit))
    server.event(call, ReplayEnd(session_id=77, reason=ReplayEndReason.STOPPED, offset=0))
    assert server.feed(late) == [ClientEvent(call.correlation_id, credit)]


def test_events_want_their_call(pair):
    client, server = pair
    with pytest.raises(BadArgument, match="no call 99"):
        client.event_parts(99, Credit(session_id=1, bytes=1))
    with pytest.raises(BadArgument, match="no event of a client"):
        client.event_parts(99, DeleteDone(recording_id=1))
    call = asked(client, server, DeleteRequest(recording_id=1))
    with pytest.raises(BadArgument, match="not answered yet"):
        server.event(call, DeleteDone(recording_id=1))
    with pytest.raises(BadArgument, match="does not belong"):
        server.event(call, ReplayData(session_id=1, start_offset=0, end_offset=0, tip_offset=0))
    client.feed(joined(server.answer(call, DeleteResponse())))
    done = DeleteDone(recording_id=1, freed_bytes=10)
    assert client.feed(joined(server.event(call, done))) == [PeerEvent(call.correlation_id, done)]


def test_after_a_refused_attach_no_event_follows(pair):
    client, server = pair
    call = asked(client, server, AttachRequest(session_id=77, credit_bytes=1))
    (answer,) = client.feed(joined(server.answer(call, refusal(ApiKey.ATTACH, ErrorCode.UNKNOWN_REPLAY))))
    assert answer.message.error_code is ErrorCode.UNKNOWN_REPLAY
    with pytest.raises(BadArgument):
        server.event(call, ReplayData(session_id=77, start_offset=0, end_offset=0, tip_offset=0))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (ListLogsResponse(), "a client does not answer"),
        (ReplayData(session_id=1, start_offset=0, end_offset=0, tip_offset=0), "no event of a client"),
        (DeleteDone(recording_id=1), "no event of a client"),
    ],
    ids=["answer", "data", "done"],
)
def test_a_client_neither_answers_nor_streams(message, why):
    with pytest.raises(ProtocolError, match=why):
        ServerConnection().feed(joined(encode(message, 1)))


def test_a_server_does_not_ask(pair):
    client, _ = pair
    with pytest.raises(ProtocolError, match="does not ask"):
        client.feed(joined(encode(StopReplayRequest(), 1)))


def test_a_future_client_learns_what_is_spoken():
    """KIP-511: the request can't be read, and is answered in version 0 all the same."""
    server = ServerConnection()
    (call,) = server.feed(frame_head((ApiKey.API_VERSIONS, FrameKind.REQUEST), 9, 3, b"fields of the future", 0))
    assert call == Call(3, ApiKey.API_VERSIONS, ApiVersionsRequest(), is_version_known=False)
    client = ClientConnection()
    correlation_id, _ = client.ask(ApiVersionsRequest())
    (answer,) = client.feed(joined(encode(versions_answer(ErrorCode.UNSUPPORTED_VERSION), correlation_id)))
    assert answer.message.error_code is ErrorCode.UNSUPPORTED_VERSION
    told = joined(server.answer_versions(call))
    assert told[6:8] == bytes(2), "version 0"
    (frame,) = FrameReader(open_frame, FrameLimits()).feed(told)
    assert frame.message == versions_answer(ErrorCode.UNSUPPORTED_VERSION)


def test_a_future_version_of_anything_else_is_refused():
    with pytest.raises(ProtocolError, match=r"^api key 6 version 9 kind 0: LIST_LOGS is spoken in version 0"):
        ServerConnection().feed(frame_head((ApiKey.LIST_LOGS, FrameKind.REQUEST), 9, 3, b"", 0))


@pytest.mark.parametrize(("key", "why"), [(ApiKey.LIST_LOGS, "LIST_LOGS has no frames of that kind"), (999, "no such")])
def test_an_event_of_a_call_that_has_none_or_of_no_call_is_refused(key, why):
    with pytest.raises(ProtocolError, match=why):
        FrameReader(open_frame, FrameLimits()).feed(frame_head((key, FrameKind.EVENT), 0, 3, b"", 0))


def of_grant(*versions):
    """ApiVersions' answer of a server with this range of versions of GRANT; without one, that knows no such call."""
    others = tuple(one for one in versions_answer().api_versions if one.api_key != ApiKey.GRANT)
    of_the_future = ApiVersion(api_key=999, min_version=0, max_version=1)
    spoken = [ApiVersion(api_key=ApiKey.GRANT, min_version=low, max_version=high) for low, high in versions]
    return ApiVersionsResponse(api_versions=(*others, of_the_future, *spoken))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [([(0, 0)], None), ([(0, 3)], None), ([(1, 2)], "versions 1 to 2"), ([], "no version")],
    ids=["the same", "newer ones, too", "newer ones only", "none"],
)
def test_a_server_that_does_not_speak_our_version_of_a_call_is_refused_by_name(theirs, named):
    assert VERSIONS[ApiKey.GRANT] == 0
    client = ClientConnection()
    correlation_id, _ = client.ask(ApiVersionsRequest())
    answer = joined(encode(of_grant(*theirs), correlation_id))
    if named is None:
        client.feed(answer)
        assert client.is_ready
        return
    with pytest.raises(ProtocolError, match=f"GRANT: we speak version 0, the peer {named}"):
        client.feed(answer)
    assert not client.is_ready
    with pytest.raises(BadArgument, match="asked first"):
        client.ask(ListLogsRequest())


def test_numbers_go_round_without_meeting_one_in_flight(pair, monkeypatch):
    assert CORRELATION_IDS == 1 << 32
    monkeypatch.setattr("pushrep.wire.connection.CORRELATION_IDS", 4)
    client, server = pair
    calls = [asked(client, server, ListLogsRequest()) for _ in range(3)]
    for _ in range(5):
        calls.append(asked(client, server, ListLogsRequest()))
        assert sorted(call.correlation_id for call in calls) == [0, 1, 2, 3]
        client.feed(joined(server.answer(calls.pop(1), ListLogsResponse())))
