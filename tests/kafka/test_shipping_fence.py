"""One shipper: what brokers refuse of an instance that was replaced, for how long, and shipping without the right to
fence.

Each test has another topic. The tests send under producer ids and epochs of closed instances, to partitions with and
without shipped records.
"""

import asyncio
import itertools
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

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

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.kafka import DestinationRefused, KafkaDestination, OutboxTakenOver, ShippingStopped
from pushrep.kafka.answers import Code
from pushrep.kafka.fence_driver import FenceDriver, transactional_id
from pushrep.kafka.fence_rules import FencedPartitions
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink import KafkaSink, SinkConfig
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Acks, Outbox
from pushrep.outbox.directory_handover import moved
from pushrep.outbox.promotion import promote
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.status.metrics import StatusCollector
from tests.integration.outboxes import wait_until
from tests.kafka.broker_processes import run
from tests.kafka.cluster import QUICK_START, KafkaCluster, free_ports, missing
from tests.kafka.coordinator_client import is_forgotten, send_under, with_cluster
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
ALL = (0, 1, 2)
REFUSED = dict.fromkeys(ALL, Code.INVALID_PRODUCER_EPOCH)
TAKEN = dict.fromkeys(ALL, Code.NONE)
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, shutdown_timeout_ms=200)
_topics = (f"fence-{number:03}" for number in itertools.count())  # none is the prefix of another one: rights go by it


def new_topic(cluster, **settings):
    create_topic(cluster.bootstrap_servers, topic := next(_topics), 3, **settings)
    return topic


def open_outbox(directory, cluster, topic, **settings):
    """Two log partitions, so that the topic's last one is not used."""
    destination = settings.pop("kafka", None) or KafkaDestination(
        bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=20
    )
    given = {"open_timeout_s": WAIT_S, "durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
    return Outbox.open(directory, topic, 2, "test", **outbox_arguments(kafka=destination, **given | settings))


def fence_of(outbox):
    return outbox.facts.shipping.sink.fencing.newest


def append(outbox, count=20):
    for partition in range(2):
        outbox.append_many(partition, [b"%d" % n for n in range(count)])


def assert_each_once(cluster, topic, outbox):
    """Check that all records are there exactly once, and no others."""
    found = read_filtered(cluster.bootstrap_servers, topic, 3)
    for partition in range(2):
        assert same(found.of(outbox.pid, partition), list(outbox.log(partition).records(0))), f"partition {partition}"
    assert found.copies == 0


@contextmanager
def second_shipper(outbox, directory, cluster):
    """Another instance that ships the same logs, as a promoted member would."""
    identity = outbox.identity
    directory.mkdir()
    shipped = SinkConfig(
        directory=directory,
        outbox_id=identity.outbox_id,
        topic=identity.topic,
        logs=[outbox.log(n) for n in range(2)],
        origin=RecordOrigin(carrier=identity.carrier, pids={0: identity.pid}, pid_epoch=0),
        batch_bytes=1000,
        filesystem=REAL_FILESYSTEM,
        clock=SYSTEM_CLOCK,
    )
    sink = KafkaSink(shipped, KafkaDestination(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=20))
    sink.start(WAIT_S)
    try:
        yield sink
    finally:
        sink.close()


def test_of_two_instances_the_one_that_was_opened_last_ships(broker, tmp_path):
    """Contract: "a batch of the older epoch is refused with INVALID_PRODUCER_EPOCH in every listed partition, used
    before or not"; "a refusal is OutboxTakenOver".
    """
    topic = new_topic(broker)
    with open_outbox(tmp_path / "outbox", broker, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        older = fence_of(outbox).producer
        with second_shipper(outbox, tmp_path / "other", broker) as other:
            assert other.fencing.newest.producer.id == older.id
            assert send_under(broker.bootstrap_servers, topic, ALL, older, 40) == REFUSED
            append(outbox)
            with pytest.raises(OutboxTakenOver, match=topic):
                outbox.wait_shipped(WAIT_S)
            outbox.flush()
            other.state.wait({0: 40, 1: 40}, None, None)
            assert not fence_of(outbox).is_standing
        assert_each_once(broker, topic, outbox)
    with open_outbox(tmp_path / "outbox", broker, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert_each_once(broker, topic, outbox)


def test_a_copy_stops_nobody_until_it_is_said_that_the_original_is_gone(broker, tmp_path):
    """Contract: "A copy (C1) uses a transactional id with its directory id until the operator says that the original is
    gone, so that a test restore stops nobody".
    """
    topic = new_topic(broker)
    copy = tmp_path / "restored" / "outbox"  # beside each other, an original that stands would be seen
    with open_outbox(tmp_path / "outbox", broker, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        shutil.copytree(tmp_path / "outbox", copy, ignore=shutil.ignore_patterns("*.sock", "*.tmp"))
        with open_outbox(copy, broker, topic) as restored:
            append(restored)
            restored.wait_shipped(WAIT_S)
            assert fence_of(restored).producer.id != fence_of(outbox).producer.id
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        moved(copy)
        with open_outbox(copy, broker, topic) as restored:
            assert fence_of(restored).producer.id == fence_of(outbox).producer.id
            append(outbox)
            with pytest.raises(OutboxTakenOver):
                outbox.wait_shipped(WAIT_S)


LEADER = """
import sys
from pushrep import Acks, LogConfig, Outbox, OutboxConfig
from pushrep.kafka import KafkaDestination, sink_session
from pushrep.replicate.settings import PushSettings

directory, topic, servers, *replicas = sys.argv[1:]
with Outbox.open(
    directory, topic, 2, "test", replicas=replicas, acks=Acks.ALL, kafka=KafkaDestination(bootstrap_servers=servers,
    retry_backoff_ms=20),
    config=OutboxConfig(
        open_timeout_s=60, push=PushSettings(backoff_min_ms=5, backoff_max_ms=50),
        log_config=LogConfig(preallocate_bytes=0, batch_bytes=2000),
    ),
) as outbox:
    def append():
        receipts = [outbox.append(n % 2, b"%d" % n * 20) for n in range(200)]
        for receipt in receipts:
            receipt.result(60)
    append()
    outbox.wait_shipped(60)
    session = sink_session.SinkSession
    send, session._dispatch = session._dispatch, lambda _: None  # what is to be sent waits
    append()
    print("stop me", flush=True)
    assert sys.stdin.readline() == "go on\\n"
    session._dispatch = send
    try:
        outbox.wait_shipped(60)
        print("shipped", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
    sys.stdin.readline()
"""


def test_a_leader_that_stood_still_while_another_was_promoted_gets_nothing_in(broker, tmp_path):
    """Contract: "with replicas it asks m members ...: its grant is the newest: it inits anew; else, or with fewer
    answers, it neither inits nor ships".
    """
    topic = new_topic(broker)
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    with ReplicaNode(tmp_path / "node-1", settings) as one, ReplicaNode(tmp_path / "node-2", settings) as two:
        directory = str(tmp_path / "outbox")
        command = [sys.executable, "-c", LEADER, directory, topic, broker.bootstrap_servers]
        command += [str(one.address), str(two.address)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
            try:
                assert leader.stdout.readline() == "stop me\n"
                leader.send_signal(signal.SIGSTOP)
                [kept] = (tmp_path / "node-1").glob("*/promises.json")
                with one.hand_over(UUID(kept.parent.name)) as last_contact:
                    promote(kept.parent, push=QUICK, last_contact=last_contact, timeout_s=WAIT_S, depose=True)
                with open_outbox(
                    kept.parent, broker, topic, replicas=[str(two.address)], acks=Acks.ALL, push=QUICK,
                    durability=Durability.FLUSHED, log_config=LogConfig(preallocate_bytes=0),
                ) as outbox:  # fmt: skip
                    append(outbox)
                    outbox.wait_shipped(WAIT_S)
                    leader.send_signal(signal.SIGCONT)
                    leader.stdin.write("go on\n")
                    leader.stdin.flush()
                    assert leader.stdout.readline() == "OutboxTakenOver\n"
                    append(outbox)
                    outbox.wait_shipped(WAIT_S)
                    assert outbox.log(0).log_end_offset == 240
                    assert_each_once(broker, topic, outbox)
            finally:
                leader.kill()


def test_a_leader_that_was_shut_out_by_an_older_one_asks_its_members_and_goes_on(broker, tmp_path):
    """The same rule from the other side: who was slow to open shuts out the newer leader for a moment."""
    topic = new_topic(broker)
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    with ReplicaNode(tmp_path / "node", settings) as node:
        given = {"replicas": [str(node.address)], "acks": Acks.ALL, "push": QUICK, "durability": Durability.FLUSHED,
                 "log_config": LogConfig(preallocate_bytes=0)}  # fmt: skip
        with open_outbox(tmp_path / "outbox", broker, topic, **given) as outbox:
            append(outbox)
            outbox.wait_shipped(WAIT_S)
            before = fence_of(outbox).producer
            with second_shipper(outbox, tmp_path / "other", broker) as other:
                assert other.fencing.newest.producer > before
            append(outbox)
            outbox.wait_shipped(WAIT_S)
            assert fence_of(outbox).producer > other.fencing.newest.producer
            assert_each_once(broker, topic, outbox)


USER, PASSWORD = "billing", "s3cret"
PRODUCER_EXPIRATION_MS, TRANSACTIONAL_EXPIRATION_MS = 4000, 8000


class ForgetfulCluster(KafkaCluster):
    """One broker that forgets silent producers and transactional ids in seconds. `server`: where USER comes in, who
    may do nothing but what ACLs say; on the other listener everything is allowed.
    """

    def __init__(self, directory):
        super().__init__(directory)
        (port,) = free_ports(1, self._reserved)
        self.server = f"127.0.0.1:{port}"
        own = f"PLAINTEXT://127.0.0.1:{self._ports[1]},CLIENTS://{self.server}"
        login = (
            'org.apache.kafka.common.security.plain.PlainLoginModule required username="broker" password="b" '
            f'user_broker="b" user_{USER}="{PASSWORD}";'
        )
        self._settings |= {
            "listeners": f"{own},CONTROLLER://127.0.0.1:{self._controllers[1]}",
            "advertised.listeners": own,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
            "listener.name.clients.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.clients.plain.sasl.jaas.config": login,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "producer.id.expiration.ms": str(PRODUCER_EXPIRATION_MS),
            "producer.id.expiration.check.interval.ms": "200",
            "transactional.id.expiration.ms": str(TRANSACTIONAL_EXPIRATION_MS),
            "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
        }

    def allow(self, *rights):
        """Give USER rights: (kind of resource, its name or the beginning of it, operation)."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        bindings = [
            AclBinding(
                ResourceType[kind], name, ResourcePatternType.PREFIXED, f"User:{USER}", "*", AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for kind, name, operation in rights
        ]  # fmt: skip
        for made in admin.create_acls(bindings).values():
            made.result(WAIT_S)

    def take_away(self, kind, name, operation):
        """Take a right that `allow` gave."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        wanted = AclBindingFilter(
            ResourceType[kind], name, ResourcePatternType.PREFIXED, f"User:{USER}", "*", AclOperation[operation],
            AclPermissionType.ALLOW,
        )  # fmt: skip
        for gone in admin.delete_acls([wanted]).values():
            assert gone.result(WAIT_S)

    def destination(self, **settings):
        """The destination with the credentials of USER."""
        return KafkaDestination(
            bootstrap_servers=self.server, security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN",
            sasl_username=USER, sasl_password=PASSWORD, retry_backoff_ms=20, **settings,
        )  # fmt: skip

    def set_transaction_version(self, level):
        """Set the version of an older cluster, or of one that is not upgraded yet."""
        upgrade = ("upgrade", "--feature", f"transaction.version={level}")
        downgrade = ("downgrade", "--feature", f"transaction.version={level}")
        where = ("org.apache.kafka.tools.FeatureCommand", "--bootstrap-server", self.bootstrap_servers)
        run(self.directory, QUICK_START, (*where, *(upgrade if level == 2 else downgrade)))


@pytest.fixture(scope="module")
def forgetful(tool_or_skip, tmp_path_factory):
    tool_or_skip(missing())
    with ForgetfulCluster(tmp_path_factory.mktemp("forgetful")) as cluster:
        yield cluster


def samples_of(outbox):
    return {one.name: one.value for family in StatusCollector(outbox.status).collect() for one in family.samples}


def wait_renewed(outbox, times):
    """Return when the fence was renewed so often since now."""
    before = fence_of(outbox).producer.epoch
    wait_until(lambda: fence_of(outbox).producer.epoch >= before + times, "it is renewed")


def test_renewed_in_time_the_fence_holds_beyond_both_expirations(forgetful, tmp_path):
    """Contract: "at each quarter of transactional.id.expiration.ms, an empty transaction renews the id". At half of
    producer.id.expiration.ms, too: that is when partitions forget an epoch.
    """
    topic = new_topic(forgetful)
    with open_outbox(tmp_path / "first", forgetful, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        older = fence_of(outbox).producer
        with second_shipper(outbox, tmp_path / "other", forgetful):
            pass
    with open_outbox(tmp_path / "first", forgetful, topic) as outbox:
        wait_renewed(outbox, 1 + TRANSACTIONAL_EXPIRATION_MS // (PRODUCER_EXPIRATION_MS // 2))
        assert not is_forgotten(forgetful.bootstrap_servers, topic, fence_name(outbox))
        end = with_cluster(forgetful.bootstrap_servers, topic, lambda cluster: cluster.bounds(0)).end
        wait_renewed(outbox, 1)
        known = outbox.facts.shipping.sink.state.sources[0]
        wait_until(lambda: known.destination_offset > end, "what is known of the topic moves on with its markers")
        assert send_under(forgetful.bootstrap_servers, topic, ALL, older, 40) == REFUSED
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert fence_of(outbox).producer.id == older.id
        assert samples_of(outbox)["pushrep_destination_fenced"] == 1
        assert samples_of(outbox)["pushrep_destination_earlier_unfenced"] == 0
        assert_each_once(forgetful, topic, outbox)


def fence_name(outbox):
    topic_id = outbox.facts.shipping.sink.state.progress.topic_id
    return transactional_id(outbox.identity.outbox_id, topic_id)


@pytest.mark.parametrize("fence", ["preferred", "required"])
def test_an_id_that_the_coordinator_forgot_is_said_or_refused(forgetful, tmp_path, monkeypatch, fence, caplog):
    """Contract: "a changed producer id ... counts as a refusal ..., and report "earlier instances are not fenced"
    (`required` refuses)". And what the fence can't hold: a partition that forgot an epoch takes it.
    """
    topic = new_topic(forgetful)
    kafka = KafkaDestination(bootstrap_servers=forgetful.bootstrap_servers, retry_backoff_ms=20, fence=fence)
    with open_outbox(tmp_path / "outbox", forgetful, topic, kafka=kafka) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        older = fence_of(outbox).producer
        with monkeypatch.context() as suspended:  # as a machine that sleeps
            suspended.setattr(FencedPartitions, "drain_due", lambda *_: ())
            forgotten = lambda: is_forgotten(forgetful.bootstrap_servers, topic, fence_name(outbox))  # noqa: E731
            wait_until(forgotten, "the coordinator forgets the id", 0.2)
        append(outbox)
        if fence == "required":
            wait_until(lambda: not fence_of(outbox).is_standing, "the renewal finds it out")
            append(outbox)  # those before may have been shipped before the renewal
            with pytest.raises(DestinationRefused, match="earlier instances are not fenced"):
                outbox.wait_shipped(WAIT_S)
            return
        wait_until(lambda: fence_of(outbox).earlier_unfenced, "the renewal finds it out")
        outbox.wait_shipped(WAIT_S)
        assert samples_of(outbox)["pushrep_destination_earlier_unfenced"] == 1
        wait_until(lambda: "earlier instances are not fenced" in caplog.text, "the renewal ends and says it")
        assert_each_once(forgetful, topic, outbox)
        assert fence_of(outbox).producer.id != older.id
        assert send_under(forgetful.bootstrap_servers, topic, ALL, older, 40) == TAKEN


def test_records_that_are_older_than_the_expiration_are_forgotten_with_their_epoch(forgetful, tmp_path, monkeypatch):
    """A limit of the fence: brokers measure a producer's silence by its records' timestamps. The next renewal restores
    it.
    """
    topic = new_topic(forgetful, retention_ms=-1)
    monkeypatch.setattr(FencedPartitions, "drain_due", lambda *_: ())
    with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
        older = fence_of(outbox).producer
        with second_shipper(outbox, tmp_path / "other", forgetful):
            assert send_under(forgetful.bootstrap_servers, topic, ALL, older) == REFUSED
    with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
        outbox.append(0, b"of 2013", timestamp_ms=1_370_000_000_000)
        outbox.wait_shipped(WAIT_S)
        taken = {0: Code.NONE}
        wait_until(
            lambda: send_under(forgetful.bootstrap_servers, topic, [0], older, 7) == taken, "it is forgotten", 0.2
        )
        assert send_under(forgetful.bootstrap_servers, topic, [2], older) == {2: Code.INVALID_PRODUCER_EPOCH}
        monkeypatch.undo()
        wait_renewed(outbox, 1)
        assert send_under(forgetful.bootstrap_servers, topic, ALL, older, 8) == REFUSED


def test_without_the_right_it_ships_unfenced_and_says_so_or_not_at_all(forgetful, tmp_path, caplog):
    """Contract: "Without the right: it ships unfenced, with warning and metric; `fence="required"` refuses"."""
    topic = new_topic(forgetful)
    forgetful.allow(*(("TOPIC", topic, operation) for operation in ("WRITE", "READ", "DESCRIBE_CONFIGS")))
    with open_outbox(tmp_path / "outbox", forgetful, topic, kafka=forgetful.destination()) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert samples_of(outbox)["pushrep_destination_fenced"] == 0
        assert "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" in fence_of(outbox).why_unfenced
        assert "without a fence" in caplog.text
    required = forgetful.destination(fence="required")
    with pytest.raises(DestinationRefused, match=r"fence=required.*TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
        open_outbox(tmp_path / "outbox", forgetful, topic, kafka=required)
    forgetful.allow(("TRANSACTIONAL_ID", f"pushrep-{outbox.identity.outbox_id}-", "WRITE"))
    with open_outbox(tmp_path / "outbox", forgetful, topic, kafka=required) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert samples_of(outbox)["pushrep_destination_fenced"] == 1
        assert_each_once(forgetful, topic, outbox)


RIGHTS = {("WRITE", "topic"), ("READ", "topic"), ("DESCRIBE_CONFIGS", "topic"), ("WRITE", "transactional-id")}
"""The table of docs/kafka.md: what an outbox needs."""
PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"


@pytest.mark.parametrize("lacking", sorted(RIGHTS - {("WRITE", "transactional-id")}))
def test_a_right_that_an_outbox_lacks_is_named_and_used_when_it_is_given(forgetful, tmp_path, lacking):
    """All of them are enough, and each one is needed; the one at the transactional id is the test's above."""
    create_topic(forgetful.bootstrap_servers, topic := f"lacks-{lacking[0].lower().replace('_', '-')}", 3)
    with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
    names = {"topic": topic, "transactional-id": f"pushrep-{outbox.identity.outbox_id}-"}
    kinds = {"topic": "TOPIC", "transactional-id": "TRANSACTIONAL_ID"}
    bindings = {(operation, kind): (kinds[kind], names[kind], operation) for operation, kind in RIGHTS}
    forgetful.allow(*(binding for right, binding in bindings.items() if right != lacking))
    said = f"the right {lacking[0]} on topic '{topic}' is missing"
    with open_outbox(
        tmp_path / "outbox", forgetful, topic, kafka=forgetful.destination(), open_timeout_s=0.1
    ) as outbox:
        append(outbox)
        outbox.flush()

        def is_named():
            lag = outbox.lag()[f"kafka:{topic}"]
            return any(said in one for one in (lag.trouble or "", *(one.reason for one in lag.stopped)))

        wait_until(is_named, said)
        forgetful.allow(bindings[lacking])
        while True:  # a partition that is stopped is tried again every 5 s
            try:
                outbox.wait_shipped(WAIT_S)
                break
            except ShippingStopped as stopped:
                assert said in str(stopped)  # noqa: PT017 - it is not what is waited for
        assert_each_once(forgetful, topic, outbox)


def test_rights_that_are_taken_away_while_it_runs_stop_no_more_than_they_have_to(forgetful, tmp_path, caplog):
    """Without the one at the transactional id it ships on under the epochs that it has, and says so; without the one to
    write the partitions wait, by its name, until it is given again.
    """
    topic = new_topic(forgetful)
    with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
        fence = ("TRANSACTIONAL_ID", f"pushrep-{outbox.identity.outbox_id}-", "WRITE")
    write, expirations = ("TOPIC", topic, "WRITE"), ("BROKER", "kafka-cluster", "DESCRIBE_CONFIGS")
    others = (("TOPIC", topic, operation) for operation in ("READ", "DESCRIBE_CONFIGS"))
    forgetful.allow(fence, write, expirations, *others)
    with open_outbox(tmp_path / "outbox", forgetful, topic, kafka=forgetful.destination()) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert fence_of(outbox).is_standing
        forgetful.take_away(*fence)
        wait_until(lambda: fence_of(outbox).why_unfenced is not None, "the renewal finds it out")
        append(outbox)
        outbox.wait_shipped(WAIT_S)
        assert "shipped to without a fence" in caplog.text
        forgetful.take_away(*expirations)
        forgetful.take_away(*write)
        lag = lambda: outbox.lag()[f"kafka:{topic}"]  # noqa: E731

        def is_named():  # a broker learns of it a moment later
            append(outbox, 1)
            return any("the right WRITE on topic" in one.reason for one in lag().stopped)

        wait_until(is_named, "it is named", 0.2)
        forgetful.allow(write)
        wait_until(lambda: lag().records == 0, "it goes on")
        assert_each_once(forgetful, topic, outbox)


def test_the_rights_in_the_docs_are_these():
    rows = PAGE.read_text(encoding="utf-8").partition("\n### Rights\n")[2].splitlines()
    cells = [line.strip("|").split("|") for line in rows if line.startswith("| outbox ")]
    assert {tuple(one.strip().split(" ")[:2]) for one in cells[0][1].split("·")} == RIGHTS


def test_a_broker_that_is_killed_within_the_fence(forgetful, tmp_path, monkeypatch, torture):
    """The errors are COORDINATOR_NOT_AVAILABLE, then COORDINATOR_LOAD_IN_PROGRESS, and the fence continues."""
    topic = new_topic(forgetful)
    with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
        append(outbox)
        outbox.wait_shipped(WAIT_S)
    for step in ("_abort", "_init", "_seek")[: torture.count(1, 3)]:
        original = getattr(FenceDriver, step)

        async def kill_first(self, *arguments, original=original, step=step):
            monkeypatch.setattr(FenceDriver, step, original)
            forgetful.kill()
            forgetful.start()
            return await original(self, *arguments)

        monkeypatch.setattr(FenceDriver, step, kill_first)
        with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
            assert getattr(FenceDriver, step) is original, "the broker was killed there"
            append(outbox)
            outbox.wait_shipped(WAIT_S)
            assert fence_of(outbox).is_standing
            assert_each_once(forgetful, topic, outbox)
    forgetful.wait_ready()


def test_below_transaction_version_2_a_renewal_names_id_and_epoch(forgetful, tmp_path):
    """Contract: "Brokers below transaction version 2 renew by an init that names id and epoch"."""
    topic = new_topic(forgetful)
    forgetful.set_transaction_version(1)
    try:
        with open_outbox(tmp_path / "outbox", forgetful, topic) as outbox:
            append(outbox)
            outbox.wait_shipped(WAIT_S)
            older = fence_of(outbox).producer
            wait_renewed(outbox, 2)
            assert send_under(forgetful.bootstrap_servers, topic, ALL, older, 40) == REFUSED
            append(outbox)
            outbox.wait_shipped(WAIT_S)
            assert fence_of(outbox).producer.id == older.id
            assert_each_once(forgetful, topic, outbox)
    finally:
        forgetful.set_transaction_version(2)


def test_markers_between_records_are_no_records_to_who_reads_or_counts(broker, tmp_path):
    """A marker takes an offset in each partition at each opening: committed positions, the place where a restart looks
    and both clients' filters count on no offset of the topic being a record.
    """
    from filtering.consumers import aiokafka, confluent

    topic, found = new_topic(broker), []
    group = {"auto.offset.reset": "earliest", "log_level": 0, "bootstrap.servers": broker.bootstrap_servers}
    for opening in range(4):
        with open_outbox(tmp_path / "outbox", broker, topic) as outbox:
            append(outbox, 5)
            outbox.wait_shipped(WAIT_S)
            assert_each_once(broker, topic, outbox)
        with confluent.ReplayFilteredConsumer(group | {"group.id": f"{topic}-confluent"}) as consumer:
            consumer.subscribe([topic])
            while len(found) < 10 * (opening + 1):
                found += [message.value() for message in consumer.consume(10, 0.1)]
            consumer.commit()
    assert sorted(found) == sorted([b"%d" % n for n in range(5)] * 8)

    async def story():
        seen = []
        given = {"group_id": f"{topic}-aiokafka", "bootstrap_servers": broker.bootstrap_servers}
        for expected in (20, 40):
            async with (
                asyncio.timeout(WAIT_S),
                aiokafka.ReplayFilteredConsumer(topic, auto_offset_reset="earliest", **given) as consumer,
            ):
                while len(seen) < expected:
                    batches = await consumer.getmany(timeout_ms=100, max_records=expected - len(seen))
                    seen += [record.value for records in batches.values() for record in records]
                await consumer.commit()
        return seen

    assert sorted(asyncio.run(story())) == sorted(found)


def test_the_judge_of_the_demo_reads_a_topic_whose_end_is_a_marker(broker, tmp_path):
    pytest.importorskip("psycopg")
    from examples.demo.kafka.check import key_rows

    topic = new_topic(broker)
    for count in (5, 0):
        with open_outbox(tmp_path / "outbox", broker, topic) as outbox:
            if count:
                append(outbox, count)
                outbox.wait_shipped(WAIT_S)
    assert len(list(key_rows(broker.bootstrap_servers, topic, 3))) == 10
