"""confluent-kafka's serializers in an outbox and in a table of rows, with a registry, and while it is away."""

import asyncio
import json
import threading
import uuid
from dataclasses import asdict, dataclass

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AsyncAvroSerializer, AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, StringSerializer
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import Session

from filtering import BadFilterSetting
from filtering.serializers import Deserializer
from pushrep import AsyncOutbox, KafkaDestination, Outbox, OutboxConfig
from pushrep.errors import BadArgument
from pushrep.tables import OutboxTable
from pushrep.values import NotWarm
from tests.support.kafka_node import free_ports

AVRO = json.dumps({
    "type": "record", "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "customer", "type": "string"}],
})  # fmt: skip
JSON = json.dumps({"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]})


@dataclass
class Order:
    id: int
    customer: str


def as_dict(order, _context):
    return asdict(order)


def kinds(client):
    """By name: a serializer, a value of it, the deserializer, and what that gives."""
    stamp = Timestamp(seconds=7)
    order = {"id": 7, "customer": "ann"}
    return {
        "avro": (AvroSerializer(client, AVRO), order, AvroDeserializer(client), order),
        "avro of objects": (AvroSerializer(client, AVRO, as_dict), Order(7, "ann"), AvroDeserializer(client), order),
        "json": (JSONSerializer(JSON, client), order, JSONDeserializer(JSON), order),
        "json of objects": (JSONSerializer(JSON, client, as_dict), Order(7, "ann"), JSONDeserializer(JSON), order),
        "protobuf": (ProtobufSerializer(Timestamp, client), stamp, ProtobufDeserializer(Timestamp), stamp),
    }


def open_outbox(path, topic, **settings):
    return Outbox.open(path, topic=topic, partitions=4, producer="billing", carrier="header", **settings)


@pytest.mark.parametrize("kind", ["avro", "avro of objects", "json", "json of objects", "protobuf"])
def test_the_schema_is_registered_at_open_under_the_kafka_topic_and_a_reader_has_the_value(tmp_path, registry, kind):
    topic = f"shop.{uuid.uuid4().hex}"
    serializer, value, deserializer, expected = kinds(registry)[kind]
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", topic=topic)
    with open_outbox(
        tmp_path, "orders", kafka=kafka, serializer=serializer, key_serializer=StringSerializer(), partition_by="key",
        config=OutboxConfig(open_timeout_s=0.1),
    ) as outbox:  # fmt: skip
        assert f"{topic}-value" in registry.get_subjects()
        assert "orders-value" not in registry.get_subjects()
        outbox.append(value=value, key="customer 7").result(60)
        [record] = [one for n in range(4) for one in outbox.log(n).records(0)]
    assert (record.value[0], record.key) == (0, b"customer 7")
    [(found, error)] = Deserializer(deserializer).read([(topic, record.value, list(record.headers))])
    assert (found, error) == (expected, None)
    assert found == deserializer(record.value, SerializationContext(topic, MessageField.VALUE))


def test_a_registry_that_is_away_stops_neither_the_opening_nor_the_loop(tmp_path, no_registry, caplog):
    loop_runs = threading.Event()
    loop_runs.set()

    class InALoop(AvroSerializer):
        def __call__(self, value, ctx=None):
            assert loop_runs.wait(60), "the loop waits for the registry"
            return super().__call__(value, ctx)

    async def main():
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=1, producer="billing", serializer=InALoop(no_registry, AVRO)
        ) as outbox:
            for append in (
                outbox.append(0, {"id": 1}),
                outbox.append_many(0, [{"id": 1}]),
                outbox.append(0, {"id": 1}),
            ):
                loop_runs.clear()
                asyncio.get_running_loop().call_soon(loop_runs.set)
                with pytest.raises(Exception, match=r"(?i)connect"):
                    await append

    asyncio.run(main())
    assert "serializer: the schema registry was not reached" in caplog.text


def test_a_table_adds_nothing_before_its_serializer_is_warm(registry):
    asked = []

    class Counting(AvroSerializer):
        def __call__(self, value, ctx=None):
            asked.append(threading.get_ident())
            return super().__call__(value, ctx)

    topic = f"shop.{uuid.uuid4().hex}"
    metadata = MetaData()
    serializer = Counting(registry, AVRO, as_dict)
    orders = OutboxTable(metadata).topic("orders", Order, partitions=4, serializer=serializer, kafka_topic=topic)
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        with pytest.raises(NotWarm, match="warm"):
            orders.add(session, Order(1, "ann"))
        assert not asked
    orders.warm()
    assert f"{topic}-value" in registry.get_subjects()
    with Session(engine) as session, session.begin():
        orders.add(session, Order(1, "ann"))
        [row] = orders.pending(session)
    assert AvroDeserializer(registry)(row.value) == {"id": 1, "customer": "ann"}


def test_a_table_whose_registry_is_away_is_not_warm(no_registry):
    orders = OutboxTable(MetaData()).topic("orders", Order, partitions=4, serializer=AvroSerializer(no_registry, AVRO))
    with pytest.raises(Exception, match=r"(?i)connect"):
        orders.warm()
    with pytest.raises(NotWarm):
        orders.add(None, Order(1, "ann"))


def test_a_table_whose_server_of_tokens_is_away_is_not_warm():
    [port] = free_ports(1)
    away = f"http://127.0.0.1:{port}"
    settings = {
        "url": away, "max.retries": 0, "bearer.auth.credentials.source": "OAUTHBEARER",
        "bearer.auth.issuer.endpoint.url": away, "bearer.auth.client.id": "shop", "bearer.auth.client.secret": "s",
        "bearer.auth.scope": "schemas", "bearer.auth.logical.cluster": "lsrc-1", "bearer.auth.identity.pool.id": "pool",
    }  # fmt: skip
    with SchemaRegistryClient(settings) as client:
        orders = OutboxTable(MetaData()).topic("orders", Order, partitions=4, serializer=AvroSerializer(client, AVRO))
        with pytest.raises(Exception, match="token"):
            orders.warm()
        with pytest.raises(NotWarm):
            orders.add(None, Order(1, "ann"))


@pytest.mark.parametrize(
    "registry", ["mock"], indirect=True
)  # Apicurio 2.6 gives a schema no GUID, which goes into a header
def test_schema_ids_in_headers_are_read_and_refused_where_they_would_be_written(tmp_path, registry):
    conf = {"schema.id.serializer": header_schema_id_serializer}
    foreign = AvroSerializer(registry, AVRO, conf=conf)
    with pytest.raises(BadArgument, match="schema ids into headers"):
        open_outbox(tmp_path, "orders", serializer=foreign)
    topic, headers = f"shop.{uuid.uuid4().hex}", []
    order = {"id": 7, "customer": "customer 7"}  # confluent-kafka takes no value below six bytes
    value = foreign(order, SerializationContext(topic, MessageField.VALUE, headers))
    [(found, error)] = Deserializer(AvroDeserializer(registry)).read([(topic, value, headers)])
    assert (found, error) == (order, None)


def test_asynchronous_serializers_are_refused_by_name(tmp_path, registry):
    serializer = object.__new__(AsyncAvroSerializer)
    with pytest.raises(BadArgument, match="AsyncAvroSerializer is asynchronous"):
        open_outbox(tmp_path, "orders", serializer=serializer)
    assert not any(tmp_path.iterdir()), "nothing is made before it is refused"
    with pytest.raises(BadFilterSetting, match="asynchronous"):
        Deserializer(serializer)
