"""A request in pieces is the same request: against aiokafka's own way, over a socket, with a broker's answers."""

import asyncio
import ssl
import struct
import subprocess
from uuid import UUID

import pytest
from aiokafka.errors import KafkaConnectionError

from pushrep.kafka.answers import BrokerAnswer
from pushrep.kafka.cluster import Connection
from pushrep.kafka.requests import ProduceBatches, answers_of

LARGE = bytes(range(256)) * 8192  # 2 MiB: more than a socket takes at once


VERSIONS = struct.pack(">hihhh", 0, 1, 0, 3, 13)  # answer to ApiVersions 0 of a broker that knows Produce, up to 13
ANSWER = bytes.fromhex(
    "00" "02" "00000000000000000000000000000007" "02"  # header's tags; one topic, one partition
    "00000001" "0000" "0000000000000005" "ffffffffffffffff" "0000000000000000" "01" "00" "00"
    "00" "00000000" "00"
)  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "TLS"])
def contexts(request, tmp_path_factory):
    """The TLS contexts of server and client; None for both without TLS."""
    if request.param == "plain":
        return None, None
    key, certificate = (str(tmp_path_factory.mktemp("tls") / name) for name in ("key.pem", "certificate.pem"))
    names = ("-subj", "/CN=broker", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


async def exchange(contexts, ways):
    """The frames that a broker got, but for the correlation id, and what came of each."""
    frames = []

    async def serve(reader, writer):
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = await reader.readexactly(size)
                answer = ANSWER if frames else VERSIONS
                frames.append(frame[:4] + frame[8:])
                answer = frame[4:8] + answer
                writer.write(struct.pack(">i", len(answer)) + answer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts[0])
    async with server:
        connection = Connection(
            *server.sockets[0].getsockname(),
            client_id="pushrep",
            request_timeout_ms=30_000,
            security_protocol="PLAINTEXT" if contexts[1] is None else "SSL",
            ssl_context=contexts[1],
        )
        await connection.connect()
        try:
            answers = [await way(connection) for way in ways]
        finally:
            await connection.close()
    return frames[1:], answers


@pytest.mark.parametrize("data", [b"small", LARGE])
def test_the_same_bytes_as_aiokafkas_own_send(contexts, data):
    batches = {1: memoryview(bytearray(data)), 3: b"another"}
    request = ProduceBatches("orders", UUID(int=7), batches, 1000)
    ways = [lambda to: to.send(request), lambda to: to.send_in_parts(request), lambda to: to.send_in_parts(request)]
    (one, two, three), answers = asyncio.run(exchange(contexts, ways))
    assert one == two == three
    assert data in one
    assert [answers_of(answer) for answer in answers] == [({1: BrokerAnswer(0, 5)}, 0)] * 3


def test_a_closed_connection_says_so():
    async def closed():
        connection = Connection("127.0.0.1", 1, client_id="pushrep")
        with pytest.raises(KafkaConnectionError):
            await connection.send_in_parts(ProduceBatches("orders", UUID(int=7), {1: b"x"}, 1000))

    asyncio.run(closed())
