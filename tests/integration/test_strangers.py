"""What peers can cost a node and a health port: without a certificate, with one that no rule names, and with a role."""

import contextlib
import gc
import socket
import ssl
import threading
import tracemalloc
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from pushrep import health
from pushrep.console import web
from pushrep.console.access import ConsoleAccess
from pushrep.console.watch import PlaceWatch
from pushrep.console.web import ConsoleServer, ConsoleSettings
from pushrep.health import HealthServer, HealthSettings
from pushrep.records import encode_batch
from pushrep.replay import NodeAccess, ReplayClient, ReplayRequest
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replay.plan import ReplayRefused, ReplaySettings
from pushrep.replicate import node_connections
from pushrep.replicate.budget import ConnectionBudget
from pushrep.replicate.certificates import CertificateFiles, mutual_tls
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.status import PlaceStatus
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as push
from pushrep.wire.calls import ApiKey, encode
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind, frame_head
from tests.integration.certificates import trial_certificates
from tests.integration.conftest import WAIT_S
from tests.integration.outboxes import wait_until

HERE = Address("127.0.0.1", 0)
OUTBOX, TP = uuid4(), TopicIdPartition(uuid4(), "orders", 0)
LARGE = 1 << 20
MANY = 200
LOOK = push.ListLogsRequest()
APPEND = (ApiKey.APPEND_RECORDS, FrameKind.REQUEST)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    trial_certificates(directory, ("127.0.0.1", "owner", "reader", "other", "stranger"))
    return directory


@pytest.fixture
def start(tmp_path, tls):
    """Makes a node; secure=True: with certificates."""
    with contextlib.ExitStack() as stack:

        def make(*, secure=False, **settings):
            files = CertificateFiles(tls / "127.0.0.1.pem", tls / "127.0.0.1.key", tls / "ca.pem")
            allow = frozenset({"owner", "reader=*:read,list", "other=*:read,list"} if secure else {"any"})
            given = {"address": HERE, "allow": allow, "certificates": files if secure else None, **settings}
            return stack.enter_context(ReplicaNode(tmp_path / "node", NodeSettings(**given)))

        yield make


def context(tls, name):
    return mutual_tls(cert=tls / f"{name}.pem", key=tls / f"{name}.key", ca=tls / "ca.pem")


def client(node, tls=None, name=""):
    settings = PushSettings(connect_timeout_ms=60_000, tls=None if tls is None else context(tls, name))
    return ReplicaClient(node.address, settings)


def raw(address, tls=None, name=""):
    """A connection without a protocol."""
    sock = socket.create_connection(address[:2], WAIT_S)
    return sock if tls is None else context(tls, name).wrap_socket(sock, server_hostname="127.0.0.1")


def is_closed(sock):
    """Whether the other end hung up; what it sent before is skipped."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except (TimeoutError, ssl.SSLError):
        return False
    return True


def versions(number):
    return b"".join(map(bytes, encode(push.ApiVersionsRequest(), number)))


def begun_append(size_bytes):
    """A whole append without its last bytes: its head, and how many records it says will follow."""
    batch = encode_batch([bytes(size_bytes)], timestamps_ms=1)
    batch.stamp(0, 256)
    part = push.AppendRecordsPartition(
        tp=TP, leader_epoch=256, replica_epoch=1, session_id=1, append_offset=0, previous_epoch=-1,
        epoch_start_offset=0, high_watermark=0, log_start_offset=0, end_session_reason=-1,
        records=(bytes(batch.data),),
    )  # fmt: skip
    return b"".join(map(bytes, encode(push.AppendRecordsRequest(partitions=(part,)), 7)))[:-1]


def fill(node, size_bytes, tls=None, name=""):
    """A log with records that FetchRecords answers with."""
    with client(node, tls, name) as leader:
        look = push.DescribeLogRequest(outbox_id=OUTBOX, create=True, partitions=(TP,))
        epoch = leader.ask(look, push.DescribeLogResponse).replica_epoch
        batch = encode_batch([bytes(size_bytes)], timestamps_ms=1)
        batch.stamp(0, 256)
        part = push.AppendRecordsPartition(
            tp=TP, leader_epoch=256, replica_epoch=epoch, session_id=1, append_offset=0, previous_epoch=-1,
            epoch_start_offset=0, high_watermark=0, log_start_offset=0, end_session_reason=-1,
            records=(bytes(batch.data),),
        )  # fmt: skip
        (result,) = leader.ask(push.AppendRecordsRequest(partitions=(part,)), push.AppendRecordsResponse).results
        assert result.error_code is ErrorCode.NONE


@pytest.mark.parametrize("sent", [b"", versions(1), versions(1)[:9]], ids=["nothing", "versions", "a part"])
def test_n2_whoever_makes_no_call_that_needs_a_role_is_closed_in_time(start, sent):
    node = start(handshake_timeout_s=0.2)
    with raw(node.address) as sock:
        sock.sendall(sent)
        assert is_closed(sock)
    wait_until(lambda: not len(node.connections), "its thread and its place are free")


def test_n2_no_dribble_moves_the_deadline_of_handshake_and_first_request(start, tls):
    node = start(secure=True, handshake_timeout_s=0.3)
    with raw(node.address) as dribbles, raw(node.address, tls, "owner") as asks:
        stop, hello = threading.Event(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context(tls, "owner").wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()

        def dribble():
            numbers = iter(range(1, 1 << 30))
            while not stop.wait(0.02):
                with contextlib.suppress(OSError):
                    dribbles.sendall(hello.read(1))
                with contextlib.suppress(OSError):
                    asks.sendall(versions(next(numbers)))

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            assert is_closed(dribbles), "within the handshake"
            assert is_closed(asks), "behind it"
        finally:
            stop.set()
            thread.join()
    assert node.connections.budget.closed["late"] == 2


def test_n2_with_a_role_it_may_be_idle_but_neither_half_of_a_request_nor_an_answer_may_last(start, monkeypatch):
    monkeypatch.setattr(node_connections, "REQUEST_S", 0.2)
    node = start(handshake_timeout_s=0.2)
    with client(node) as idle, client(node) as stops:
        assert idle.ask(LOOK, push.ListLogsResponse).error_code is ErrorCode.NONE
        assert stops.ask(LOOK, push.ListLogsResponse).error_code is ErrorCode.NONE
        stops.socket.sendall(begun_append(LARGE)[: LARGE // 2])
        assert is_closed(stops.socket)
        wait_until(lambda: len(node.connections) == 1, "it is gone")
        assert idle.ask(LOOK, push.ListLogsResponse).error_code is ErrorCode.NONE


def test_n2_whoever_reads_no_answer_is_closed_and_holds_no_more_than_its_share(start, monkeypatch):
    monkeypatch.setattr(node_connections, "SEND_S", 0.3)
    node = start(handshake_timeout_s=0.2, requests_bytes_max=64 << 20)
    size = 7 << 20
    fill(node, size)
    fetch = push.FetchRecordsRequest(tp=TP, grant_epoch=1 << 20, offset=0, max_bytes=8 << 20)
    never = []
    for _ in range(6):
        one = client(node)
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.socket.sendall(b"".join(map(bytes, one.protocol.ask(fetch)[1])))
        never.append(one)
    most = 0

    def are_gone():
        nonlocal most
        most = max(most, node.connections.budget.held_bytes)
        return not len(node.connections)

    wait_until(are_gone, "each was closed, and the next one had its turn")
    assert 0 < most <= 16 << 20, "a quarter of 64 MiB"
    assert node.connections.budget.closed["late"] == 6
    for one in never:
        one.close()


def test_n2_a_certificate_that_no_rule_names_is_closed_after_its_first_refusal(start, tls):
    node = start(secure=True)
    with client(node, tls, "stranger") as asks:
        assert asks.ask(LOOK, push.ListLogsResponse).error_code is ErrorCode.UNAUTHORISED
        assert is_closed(asks.socket)
    assert node.connections.budget.closed == {"full": 0, "late": 0}, "at once, by no deadline"
    with client(node, tls, "reader") as reads:
        for _ in range(2):
            fetch = push.BeatRequest(outbox_id=OUTBOX, leader=0, leader_epoch=256)
            assert reads.ask(fetch, push.BeatResponse).error_code is ErrorCode.UNAUTHORISED, "it has another role"
        assert reads.ask(LOOK, push.ListLogsResponse).error_code is ErrorCode.NONE


def test_n3_of_a_large_request_without_the_right_nothing_is_read(start, tls):
    node = start(secure=True)
    with raw(node.address, tls, "stranger") as sock, raw(node.address, tls, "reader") as reads:
        for one in (sock, reads):
            one.sendall(versions(1) + begun_append(LARGE)[:1000])  # its head is whole
            assert is_closed(one)
        assert node.connections.budget.held_bytes == 0
    assert {who for _, who in node.access.refusals()} == {"stranger", "reader"}
    with raw(node.address, tls, "stranger") as sock:  # its header alone is large: never waited for
        sock.sendall(frame_head(APPEND, 0, 1, bytes(900_000), 0)[:100])
        assert is_closed(sock)


def test_n3_requests_above_the_sum_stay_unread_until_others_are_done(start):
    node = start(requests_bytes_max=8 * LARGE)  # a quarter: two of them
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(client(node)) for _ in range(4)]
        for one in first:
            one.ask(LOOK, push.ListLogsResponse)
            one.socket.sendall(begun_append(LARGE // 2))
        wait_until(lambda: node.connections.budget.held_bytes > LARGE, "three of them have come")
        assert node.connections.budget.held_bytes < 2 * LARGE
        fill(node, 1000)  # a small one needs none of it
        held = node.connections.budget.held_bytes
        first[0].close()
        first[1].close()
        wait_until(lambda: len(node.connections) <= 2, "these are gone")
        assert 0 < node.connections.budget.held_bytes <= held


def test_n3_what_a_closed_connection_held_is_free_without_the_garbage_collector(start):
    node = start()
    body, count = 4 << 20, 6
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        senders = [client(node) for _ in range(count)]
        for one in senders:
            one.ask(LOOK, push.ListLogsResponse)
        before, _ = tracemalloc.get_traced_memory()
        sent = begun_append(2 * body)[:body]
        for one in senders:
            one.socket.sendall(sent)
        wait_until(lambda: tracemalloc.get_traced_memory()[0] - before > count * body, "they are being received")
        for one in senders:
            one.close()
        wait_until(lambda: not len(node.connections), "the peers have gone")
        wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < 2 * body, "and so has what they held")
    finally:
        tracemalloc.stop()
        gc.enable()


def test_n1_sessions_of_one_identity_leave_those_of_another(start, tls):
    node = start(secure=True, replay=ReplaySettings(max_sessions=2, connect_timeout_ms=600_000))
    fill(node, 10, tls, "owner")
    request = ReplayRequest("orders-0", bound="written")
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(ReplayClient(str(node.address), node=NodeAccess(tls=context(tls, name))))
            for name in ("reader", "other")
        }
        for _ in range(2):
            clients["reader"].start_replay(request)
        with pytest.raises(ReplayRefused, match="MAX_REPLAYS"):
            clients["reader"].start_replay(request)
        clients["other"].start_replay(request)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_n4_a_node_that_is_flooded_answers_the_one_with_a_role_and_a_new_one(start, tls, secure):
    node = start(secure=secure, connections_max=40)
    given = (tls, "owner") if secure else ()
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(client(node, *given))
        look = push.DescribeLogRequest(outbox_id=OUTBOX, create=True, partitions=(TP,))
        assert leader.ask(look, push.DescribeLogResponse).error_code is ErrorCode.NONE
        for number in range(MANY):
            sock = stack.enter_context(socket.create_connection(node.address[:2], WAIT_S))
            sock.sendall((b"", b"\x16", versions(1), versions(1)[:5])[number % 4])
            if number % 20 == 0:
                assert leader.ask(look, push.DescribeLogResponse).error_code is ErrorCode.NONE
        assert len(node.connections) <= 41
        with until_answered(node, given) as well:
            assert well.ask(look, push.DescribeLogResponse).error_code is ErrorCode.NONE
    wait_until(lambda: len(node.connections) == 0, "all have gone")
    assert node.connections.budget.closed["full"] >= MANY // 4


def until_answered(node, given):
    """A client that connects while others do: its connection may be the one that makes room."""
    found = []

    def connected():
        with contextlib.suppress(NodeUnreachable):
            found.append(client(node, *given))
        return found

    wait_until(connected, "a well-behaved client gets in")
    return found[0]


@contextlib.contextmanager
def health_port(files):
    names = dict(zip(("cert", "key", "ca"), map(str, files), strict=False))
    with HealthServer(HealthSettings(listen="127.0.0.1:0", **names), PlaceStatus, CollectorRegistry()) as server:
        yield server.address, server.budget


@contextlib.contextmanager
def console(files):
    settings = ConsoleSettings(access=ConsoleAccess(listen=HERE), certificate=files[:2] or None)
    with ConsoleServer(PlaceWatch((), every_s=3600), settings) as server:
        yield server.address, server.budget


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("served", [health_port, console])
def test_n4_a_port_of_pages_that_is_flooded_answers_and_holds_a_bounded_number(tls, monkeypatch, served, secure):
    for module in (health, web):
        monkeypatch.setattr(module, "_CONNECTIONS_MAX", 40)
    files = (tls / "127.0.0.1.pem", tls / "127.0.0.1.key", tls / "ca.pem") if secure else ()
    ours = set(threading.enumerate())
    with served(files) as (address, kept), contextlib.ExitStack() as stack:
        for number in range(MANY):
            sock = stack.enter_context(socket.create_connection(address[:2], WAIT_S))
            sock.sendall((b"", b"G", b"GET /livez HTTP/1.1\r\nX: ")[number % 3])
        assert len(kept) <= 40
        assert len(set(threading.enumerate()) - ours) <= 60, "closed ones may just be ending"

        def answer():
            try:
                with raw(address, *((tls, "owner") if secure else ())) as sock:
                    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    return sock.recv(100)
            except OSError:  # it made room for another one
                return b""

        wait_until(lambda: answer().startswith(b"HTTP/1."), "a well-behaved one is answered")
        stack.close()
        wait_until(lambda: not len(kept), "all have gone")


def test_n2_a_console_s_silent_and_half_said_requests_are_closed_in_time(monkeypatch):
    monkeypatch.setattr(web, "FIRST_S", 0.2)
    monkeypatch.setattr(web, "ConnectionBudget", lambda *given, **more: ConnectionBudget(*given, first_s=0.2, **more))
    with console(()) as (address, kept), raw(address) as silent, raw(address) as half, raw(address) as again:
        half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        again.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHost: loc")
        for one in (silent, half, again):
            assert is_closed(one)
        wait_until(lambda: not len(kept), "their places are free")
        assert kept.closed["late"] == 3


def test_n2_a_health_request_has_one_deadline_and_a_bounded_head(monkeypatch):
    monkeypatch.setattr(
        health, "ConnectionBudget", lambda *given, **more: ConnectionBudget(*given, first_s=0.2, **more)
    )
    with HealthServer(HealthSettings(listen="127.0.0.1:0"), PlaceStatus, CollectorRegistry()) as server:
        with raw(server.address) as slow:
            slow.sendall(b"GET /livez HTTP/1.1\r\n")
            assert is_closed(slow)
        with raw(server.address) as wide, contextlib.suppress(ConnectionError):
            wide.sendall(b"GET /livez HTTP/1.1\r\n" + b"X: " + bytes(200_000))
            assert is_closed(wide)
        with raw(server.address) as well:
            well.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 OK" in well.recv(100)


def test_n9_a_topic_is_its_first_creator_s_and_another_one_needs_a_pattern(start, tls):
    def create(node, name, outbox, *topics):
        look = push.DescribeLogRequest(
            outbox_id=outbox, create=True, partitions=tuple(TopicIdPartition(uuid4(), topic, 0) for topic in topics)
        )
        with client(node, tls, name) as asks:
            answer = asks.ask(look, push.DescribeLogResponse)
        return answer.error_code, answer.error_message

    node = start(secure=True, allow=frozenset({"owner", "other", "reader=bills*:create"}))
    mine, others = uuid4(), [uuid4() for _ in range(4)]
    assert create(node, "owner", mine, "bills")[0] is ErrorCode.NONE
    code, why = create(node, "other", others[0], "bills")
    assert code is ErrorCode.UNAUTHORISED
    assert "another identity created bills here" in why
    assert create(node, "other", others[0], "orders", "bills")[0] is ErrorCode.UNAUTHORISED
    assert create(node, "other", others[1], "orders")[0] is ErrorCode.NONE
    assert create(node, "other", others[1], "bills")[0] is ErrorCode.UNAUTHORISED, "in an outbox of its own, too"
    assert create(node, "owner", uuid4(), "bills")[0] is ErrorCode.NONE, "a second one of its own"
    assert create(node, "reader", others[2], "bills")[0] is ErrorCode.NONE, "its pattern covers it"
    assert create(node, "reader", others[3], "bills", "orders")[0] is ErrorCode.UNAUTHORISED
    node.stop()
    node = start(secure=True, allow=frozenset({"owner", "other"}))
    assert create(node, "other", others[0], "bills")[0] is ErrorCode.UNAUTHORISED, "the disk knows it"
    assert node.access.owner_of(mine) == "owner"
