"""What the brokers can take: ready-made requests from memory, the least that any client could do.

made before: [size, header, fields, batch] ...    one thread: sendall, five in flight    another: answers
"""

import socket
import struct
import threading
from itertools import count

from confluent_kafka.admin import AdminClient

from pushrep.kafka import KafkaDestination
from pushrep.kafka.requests import ProduceBatches
from pushrep.kafka.topic import look_at_topic
from pushrep.records import RecordBatch
from tests.kafka.cluster import KafkaCluster

IN_FLIGHT = 5
_TIMEOUT_S = 60
_VERSIONS = {0: (0, 13)}
_producer_ids = count(9_000_000)  # far from those that brokers give out
_ERROR_AT = 4 + 1 + 1 + 16 + 1 + 4  # correlation id, tags, topics, topic id, partitions, index


class ReadyMade:
    """A log's batches on their way to partition 0 of a topic of their own; connected, and used once."""

    def __init__(self, cluster: KafkaCluster, topic: str, batches: list[RecordBatch]) -> None:
        facts = look_at_topic(KafkaDestination(bootstrap_servers=cluster.bootstrap_servers), topic)
        found = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic, timeout=_TIMEOUT_S)
        leader = found.brokers[found.topics[topic].partitions[0].leader]
        self._socket = socket.create_connection((leader.host, leader.port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._requests: list[bytes] = []
        self._records, producer_id = 0, next(_producer_ids)
        for number, batch in enumerate(batches):
            data = batch.with_producer(producer_id, 0, self._records)
            request = ProduceBatches(topic, facts.topic_id, {0: data}, 30_000).prepare(_VERSIONS)
            header = request.build_request_header(correlation_id=number, client_id="ready-made").encode()
            body = header + request.encode()
            self._requests.append(struct.pack(">i", len(body)) + body)
            self._records += len(batch)

    def send(self) -> int:
        """Until all are acknowledged; how many records that were."""
        room = threading.Semaphore(IN_FLIGHT)
        sending = threading.Thread(target=self._send, args=(room,))
        sending.start()
        with self._socket, self._socket.makefile("rb") as answers:
            for number in range(len(self._requests)):
                (size,) = struct.unpack(">i", answers.read(4))
                answer = answers.read(size)
                said = (*struct.unpack_from(">i", answer), *struct.unpack_from(">h", answer, _ERROR_AT))
                if said != (number, 0):
                    raise RuntimeError(f"request {number}: the broker answers {said}")
                room.release()
            sending.join()
        return self._records

    def _send(self, room: threading.Semaphore) -> None:
        for request in self._requests:
            room.acquire()
            self._socket.sendall(request)
