"""The rights that producers, consumers and stores need, on a broker that allows nothing without an ACL.

RIGHTS is the table of docs/clients.md: with these everything works, and each one, when it is missing, is named.
"""

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from filtering import HighwaterMarks, MissingRight, StreamMetadata, sqe_producer_id
from filtering.consumers.confluent_client import ConfluentMarksTopic
from partitioner import PartitionStopped
from pushrep.startpoints import Startpoint, StoreUnavailable, store_at
from tests.integration.outboxes import wait_until
from tests.kafka.cluster import KafkaCluster, free_ports, missing
from tests.kafka.plain_client import consume as read_plainly
from tests.kafka.plain_client import create_topic, plain_producer
from tests.kafka.test_filtering_consumers import SESSION_MS, WAIT_S

pytestmark = [pytest.mark.java, pytest.mark.slow]

USERS = [f"user{number}" for number in range(40)]
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_users, _names = iter(USERS), (f"rights-{number}" for number in itertools.count())
_KINDS = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "transactional-id": ResourceType.TRANSACTIONAL_ID}

RIGHTS = {
    "producer": [("WRITE", "topic"), ("DESCRIBE_CONFIGS", "topic")],
    "consumer": [("READ", "topic"), ("READ", "group")],
    "consumer of aiokafka": [("READ", "topic"), ("READ", "group")],
    "consumer with marks_topic": [
        ("READ", "topic"), ("READ", "group"), ("READ", "marks topic"), ("WRITE", "marks topic"),
        ("DESCRIBE_CONFIGS", "marks topic"),
    ],
    "apply job over a topic": [("READ", "topic"), ("DESCRIBE_CONFIGS", "topic")],
    "relay job": [
        ("READ", "topic"), ("DESCRIBE_CONFIGS", "topic"), ("WRITE", "destination"), ("DESCRIBE_CONFIGS", "destination"),
    ],
    "store of startpoints": [
        ("READ", "topic"), ("WRITE", "topic"), ("DESCRIBE_CONFIGS", "topic"), ("WRITE", "transactional-id"),
    ],
}  # fmt: skip
"""What each needs; a resource of each kind."""


class GuardedCluster(KafkaCluster):
    """One broker with one more listener, for users with a name and a password, who may only what an ACL allows."""

    def __init__(self, directory):
        super().__init__(directory)
        [port] = free_ports(1, self._reserved)
        self.guarded = f"127.0.0.1:{port}"
        own = f"PLAINTEXT://127.0.0.1:{self._ports[1]},GUARDED://{self.guarded}"
        logins = " ".join(f'user_{name}="p"' for name in USERS)
        self._settings |= {
            "listeners": f"{own},CONTROLLER://127.0.0.1:{self._controllers[1]}",
            "advertised.listeners": own,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GUARDED:SASL_PLAINTEXT",
            "listener.name.guarded.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": (
                f"org.apache.kafka.common.security.plain.PlainLoginModule required {logins};"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }


@pytest.fixture(scope="module")
def guarded(tool_or_skip, tmp_path_factory):
    tool_or_skip(missing())
    with GuardedCluster(tmp_path_factory.mktemp("guarded") / "kafka") as cluster:
        yield cluster


class Case:
    """A separate user, its topic, group and marks topic, and its rights."""

    def __init__(self, cluster, *, is_compacted=False):
        self.cluster, self.user = cluster, next(_users)
        self._admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        base = next(_names)
        self.topic, self.marks, self.group, self.destination = base, f"{base}-marks", f"{base}-group", f"{base}-out"
        policy = {"cleanup_policy": "compact"} if is_compacted else {}
        create_topic(cluster.bootstrap_servers, self.topic, **policy)
        create_topic(cluster.bootstrap_servers, self.marks, cleanup_policy="compact")
        create_topic(cluster.bootstrap_servers, self.destination)
        self._names = {
            "topic": ("topic", self.topic), "marks topic": ("topic", self.marks),
            "destination": ("topic", self.destination), "group": ("group", self.group),
            "transactional-id": ("transactional-id", f"pushrep-startpoints-{self.topic}"),
        }  # fmt: skip
        self.librdkafka = {
            "bootstrap.servers": cluster.guarded, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN",
            "sasl.username": self.user, "sasl.password": "p", "log_level": 0,
        }  # fmt: skip
        self.aiokafka = {
            "bootstrap_servers": cluster.guarded, "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN",
            "sasl_plain_username": self.user, "sasl_plain_password": "p",
        }  # fmt: skip

    def resource(self, right):
        """The kind and name of the resource."""
        return self._names[right[1]]

    def allow(self, rights):
        made = self._admin.create_acls([self._acl(AclBinding, right) for right in rights])
        for one in made.values():
            one.result(WAIT_S)

    def take_away(self, right):
        for one in self._admin.delete_acls([self._acl(AclBindingFilter, right)]).values():
            assert one.result(WAIT_S)

    def _acl(self, kind, right):
        resource, name = self.resource(right)
        return kind(
            _KINDS[resource], name, ResourcePatternType.LITERAL, f"User:{self.user}", "*",
            AclOperation[right[0]], AclPermissionType.ALLOW,
        )  # fmt: skip

    def fill(self, count=3, pairs=1):
        producer = plain_producer(self.cluster.bootstrap_servers)
        for offset in range(count):
            for source in range(pairs):
                key = StreamMetadata(sqe_producer_id("t", str(source)), source, offset).pack()
                producer.produce(self.topic, key=key, value=b"v", partition=0)
        assert producer.flush(WAIT_S) == 0


def produce(case):
    from partitioner.confluent import SourcePartitionProducer

    with SourcePartitionProducer(case.librdkafka, case.topic) as producer:
        producer.produce(StreamMetadata(7, 0, 0), b"v")
        producer.flush(WAIT_S)


def consume(case, pairs=1, **more):
    from filtering.consumers.confluent import ReplayFilteredConsumer

    case.fill(pairs=pairs)
    settings = {**case.librdkafka, "group.id": case.group, "auto.offset.reset": "earliest"}
    with ReplayFilteredConsumer(settings, **more) as reader:
        reader.subscribe([case.topic])
        while not reader.consume(500, 0.2):
            pass
        reader.commit()
    with ReplayFilteredConsumer(settings, **more) as again:
        again.subscribe([case.topic])
        case.fill(4, pairs)
        while not again.consume(500, 0.2):
            pass


def consume_with_marks(case):
    consume(case, pairs=300, marks_topic=case.marks)


def consume_with_aiokafka(case):
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    case.fill()

    async def story():
        async with (
            asyncio.timeout(WAIT_S),
            ReplayFilteredConsumer(
                case.topic, group_id=case.group, auto_offset_reset="earliest", session_timeout_ms=SESSION_MS,
                **case.aiokafka,
            ) as reader,
        ):  # fmt: skip
            while not await reader.getmany(timeout_ms=100):
                pass
            await reader.commit()

    asyncio.run(story())


def keep_startpoints(case):
    settings = {name: value for name, value in case.librdkafka.items() if name != "log_level"}
    with store_at(f"kafka:{case.topic}", {**settings, "request.timeout.ms": "5000"}) as store:
        number = store.write("billing", "orders", 0, Startpoint.specific(1), "why", author="ann")
        assert store.read("billing", "orders", 0).sequence == number


RUNS = {
    "producer": produce,
    "consumer": consume,
    "consumer of aiokafka": consume_with_aiokafka,
    "consumer with marks_topic": consume_with_marks,
    "store of startpoints": keep_startpoints,
}


def named(error):
    """The right that an error names, in itself or as its cause."""
    if isinstance(error, PartitionStopped):
        error = error.cause
    assert isinstance(error, MissingRight), repr(error)
    return error.operation, (error.resource, error.name)


@pytest.mark.parametrize("who", sorted(RIGHTS.keys() - {"store of startpoints", "relay job", "apply job over a topic"}))
def test_these_rights_are_enough_and_a_missing_one_is_named(guarded, who):
    rights, run = RIGHTS[who], RUNS[who]
    case = Case(guarded)
    case.allow(rights)
    run(case)
    for right in rights:
        lacking = Case(guarded)
        lacking.allow([one for one in rights if one != right])
        with pytest.raises((MissingRight, PartitionStopped)) as refused:
            run(lacking)
        assert named(refused.value) == (right[0], lacking.resource(right)), right


def test_a_right_to_write_marks_is_named_also_where_the_client_knew_before_a_record_was_sent(guarded, capfd):
    """The client requests a producer id by itself, and refuses the first record with only "Fatal error"."""
    case = Case(guarded)
    case.allow([right for right in RIGHTS["consumer with marks_topic"] if right != ("WRITE", "marks topic")])
    marks = ConfluentMarksTopic(case.librdkafka, case.marks)
    wait_until(lambda: "FATAL" in capfd.readouterr().err, "the client is refused a producer id")
    with contextlib.closing(marks), pytest.raises(MissingRight) as refused:
        marks.write(case.group, (case.topic, 0), HighwaterMarks.from_columns([7], [0], [3]))
    assert named(refused.value) == ("WRITE", ("topic", case.marks))


def test_a_right_that_goes_while_a_producer_runs_stops_its_partition_by_name(guarded):
    from partitioner.confluent import SourcePartitionProducer

    case = Case(guarded)
    case.allow([*RIGHTS["producer"], ("DESCRIBE", "topic")])
    with SourcePartitionProducer(case.librdkafka, case.topic) as producer:
        producer.produce(StreamMetadata(7, 0, 0), b"v")
        producer.flush(WAIT_S)
        case.take_away(("WRITE", "topic"))
        producer.produce(StreamMetadata(7, 0, 1), b"v")
        with pytest.raises(PartitionStopped) as stopped:
            producer.flush(WAIT_S)
        assert named(stopped.value) == ("WRITE", ("topic", case.topic))
        case.allow([("WRITE", "topic")])
        producer.retry(0)
        producer.flush(WAIT_S)


def test_a_store_of_startpoints_names_what_it_lacks(guarded):
    rights = RIGHTS["store of startpoints"]
    case = Case(guarded, is_compacted=True)
    case.allow(rights)
    keep_startpoints(case)
    for right in rights:
        lacking = Case(guarded, is_compacted=True)
        lacking.allow([one for one in rights if one != right])
        with pytest.raises(StoreUnavailable) as refused:
            keep_startpoints(lacking)
        assert "uthoriz" in str(refused.value) or "right WRITE on topic" in str(refused.value), right
        assert "reached" not in str(refused.value), right


def test_the_table_in_the_docs_is_this_one():
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").partition("\n## Rights\n")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] in RIGHTS:
            rows[cells[0]] = {tuple(one.strip().split(" ", 1)) for one in cells[1].split("·")}
    assert rows == {who: set(rights) for who, rights in RIGHTS.items()}


def as_source(case):
    """A job's options to read the topic as this user, and no other ones of Kafka."""
    login = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="{case.user}" password="p";'
    source = {
        "kafka.bootstrap.servers": case.cluster.guarded, "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN", "kafka.sasl.jaas.config": login,
    }  # fmt: skip
    named = (part for pair in source.items() for part in ("--source-option", "=".join(pair)))
    return ("--source", "kafka", "--topic", case.topic, *named)


@pytest.mark.spark
@pytest.mark.parametrize("lacks", [[], [("DESCRIBE_CONFIGS", "topic")]], ids=["all", "none to see settings"])
def test_the_rights_of_the_apply_job_are_enough_and_without_those_to_see_settings_it_warns(
    guarded, spark_driver, tmp_path, lacks
):
    case = Case(guarded)
    case.allow([one for one in RIGHTS["apply job over a topic"] if one not in lacks])
    case.fill(20)
    places = ("--sink", f"{tmp_path}/table", "--checkpoint", f"{tmp_path}/checkpoint")
    code, said = spark_driver.job(name="apply", arguments=[*as_source(case), *places])
    assert code == 0, said
    assert "records kept 20" in said
    assert (f"topic {case.topic}: the right DESCRIBE_CONFIGS is missing" in said) == bool(lacks), said


@pytest.mark.spark
def test_the_rights_of_the_relay_job_are_enough(guarded, spark_driver, tmp_path):
    case = Case(guarded)
    case.allow(RIGHTS["relay job"])
    case.fill(20)
    sink = {name: value for name, value in case.librdkafka.items() if name != "bootstrap.servers"}
    code, said = spark_driver.job(
        name="relay",
        arguments=[
            *(*as_source(case), "--application", "billing", "--to-topic", case.destination),
            *("--checkpoint", str(tmp_path / "checkpoint"), "--to-servers", guarded.guarded),
            *(part for pair in sink.items() for part in ("--to-option", "=".join(map(str, pair)))),
        ],
    )
    assert code == 0, said
    assert len(read_plainly(guarded.bootstrap_servers, case.destination)) == 20
