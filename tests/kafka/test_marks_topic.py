"""Marks in a compacted topic, on a real broker: what every store is shown to do, and what is its own.

Contract "Spark", where marks live: a Kafka topic; marks keyed (query id, batch); versions kept; a second driver's
commit of N fails; a store of another query is refused.
"""

import inspect
import itertools
import json
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from click.testing import CliRunner
from tenacity import Retrying, retry_if_exception_type, stop_after_delay

from filtering import HighwaterMarks
from pushrep.kafka import KafkaDestination, KafkaUnreachable
from pushrep.kafka.store_topic import CommittedRecords, KeyedTopic
from pushrep.kafka.topic import look_at_topic
from tests.kafka.plain_client import consume, create_topic, plain_producer, send

pytest.importorskip("pyspark")

from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey
from spark_jobs.marks import MarksFenced, MarksStoreDamaged
from spark_jobs.marks_command import marks as marks_command
from spark_jobs.topic_marks import FORMAT, VERSION, MarksTopicUnfit, TopicMarks
from tests.spark.replay import test_marks_stores as any_store
from tests.spark.replay.test_marks_stores import marks_of

pytestmark = [pytest.mark.java, pytest.mark.slow]

_names = (f"marks-{number}" for number in itertools.count())


def of_any_store():
    """The suite of all stores, but for its tests that run Spark: those have a stream of their own here."""
    for name, test in vars(any_store).items():
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["open_store"]:
            yield name, test


SHARED = dict(of_any_store())
globals().update(SHARED)


def test_one_suite_is_for_all_stores():
    assert len(SHARED) >= 5


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return name


@pytest.fixture
def opened(broker, topic):
    """Opens one more store on the topic; all are closed at the end."""
    stores = []

    def open_():
        stores.append(TopicMarks(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic)))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def open_store(opened):
    """The same place again each time, the one before it closed."""
    last = []

    def open_():
        for store in last:
            store.close()
        last[:] = [opened()]
        return last[0]

    return open_


def large(query, batch, pairs=4000):
    marks = HighwaterMarks.from_columns(list(range(pairs)), [0] * pairs, [batch + n for n in range(pairs)], [0] * pairs)
    return BatchMarks(query, batch, (LogRange("t", 0, 0, 9),), {MarksKey("t"): marks})


def newest(broker, topic):
    return {seen.key.decode(): seen.value for seen in consume(broker.bootstrap_servers, topic)}


def test_a_batch_is_its_parts_and_then_its_seal(broker, opened):
    """One record for each (query id, batch, part); beyond max.message.bytes it goes in parts under a sealed head."""
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact", max_message_bytes=20_000)
    with TopicMarks(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)) as store:
        store.write(large("q", 0), keep=3)
        assert store.read("q", 0) == large("q", 0)
    seen = consume(broker.bootstrap_servers, name)
    size = len(large("q", 0).to_bytes())
    parts = [record for record in seen if record.key.startswith(b"q/0/")]
    assert [record.key.decode() for record in seen] == ["format", *(f"q/0/{n}" for n in range(len(parts))), "q/0"]
    assert json.loads(seen[0].value) == {"format": "pushrep.marks", "version": 1}
    assert json.loads(seen[-1].value)["parts"] == len(parts) == -(-size // (20_000 - 1024)) > 1
    assert b"".join(record.value for record in parts) == large("q", 0).to_bytes()
    with TopicMarks(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)) as again:
        assert again.read("q", 0) == large("q", 0)
        again.write(marks_of("q", 0, 5), keep=3)
        assert again.read("q", 0) == marks_of("q", 0, 5)
    last = newest(broker, name)
    assert [last[f"q/0/{n}"] for n in range(1, len(parts))] == [None] * (len(parts) - 1), "it got smaller"


def test_versions_that_are_not_kept_get_tombstones(broker, topic, opened):
    """Versions are kept for minBatchesToRetain, then tombstoned: compaction takes them all."""
    store = opened()
    for batch in range(5):
        store.write(marks_of("q", batch, batch), keep=2)
    assert store.batches("q") == [3, 4]
    last = newest(broker, topic)
    there = {key for key, value in last.items() if value is not None}
    assert there == {"format", "q/3", "q/3/0", "q/4", "q/4/0"}
    assert {key for key, value in last.items() if value is None} == {
        f"q/{batch}{part}" for batch in range(3) for part in ("", "/0")
    }


def test_a_second_driver_s_commit_of_a_batch_fails(opened):
    """Contract: a second driver's commit of N fails; the first one continues."""
    first, second = opened(), opened()
    first.write(marks_of("q", 0), keep=9)
    for store in (first, second):
        assert (store.owner(), store.read("q", 0), store.batches("q")) == ("q", marks_of("q", 0), [0])
    first.write(marks_of("q", 1, 10), keep=9)
    with pytest.raises(MarksFenced, match="batch 1 of query q") as refused:
        second.write(marks_of("q", 1, 11), keep=9)
    assert (refused.value.query_id, refused.value.batch_id) == ("q", 1)
    assert second.read("q", 1) == first.read("q", 1) == marks_of("q", 1, 10)
    first.write(marks_of("q", 2), keep=9)
    with pytest.raises(MarksFenced):
        second.drop_from("q", 0)
    assert opened().batches("q") == [0, 1, 2]


@pytest.mark.parametrize("other_does", ["drops it", "writes it anew"])
def test_a_batch_that_another_driver_changes_the_moment_it_is_stored_is_fenced(opened, monkeypatch, other_does):
    first, second = opened(), opened()
    first.write(marks_of("q", 0), keep=9)
    change = KeyedTopic.change

    def changed_in_between(topic, records):
        monkeypatch.undo()
        offset = change(topic, records)
        second.drop_from("q", 1) if other_does == "drops it" else second.write(marks_of("q", 1, 11), keep=9)
        return offset

    monkeypatch.setattr(KeyedTopic, "change", changed_in_between)
    with pytest.raises(MarksFenced, match="batch 1 of query q"):
        first.write(marks_of("q", 1, 10), keep=9)
    assert first.read("q", 1) == (None if other_does == "drops it" else marks_of("q", 1, 11))


def test_who_only_looks_disturbs_nobody(opened):
    writer = opened()
    for batch in range(4):
        writer.write(marks_of("q", batch), keep=9)
        assert opened().batches("q") == list(range(batch + 1))


def test_a_writer_that_another_one_fenced_goes_on_where_nothing_was_written(opened, producers):
    """Fencing decides who writes; the content of the topic decides who may continue."""
    first, second = opened(), opened()
    first.write(marks_of("q", 0), keep=9)
    producers.lost, producers.away = False, KafkaUnreachable("pulled")
    with pytest.raises(KafkaUnreachable, match="pulled"):
        second.write(marks_of("q", 1, 7), keep=9)
    producers.away = None
    first.write(marks_of("q", 1), keep=9)
    assert second.batches("q") == [0, 1]
    second.write(marks_of("q", 2), keep=9)
    assert first.batches("q") == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cleanup_policy": "delete"}, "cleanup.policy=delete"),
        ({"cleanup_policy": "compact,delete"}, "cleanup.policy=compact,delete"),
        ({"cleanup_policy": "compact", "partitions": 2}, "partitions=2"),
        ({"cleanup_policy": "compact", "max_message_bytes": 4000}, "max.message.bytes=4000"),
    ],
)
def test_a_topic_that_would_lose_marks_is_refused_by_name(broker, settings, named):
    create_topic(broker.bootstrap_servers, name := next(_names), **settings)
    with pytest.raises(MarksTopicUnfit, match=named.replace(".", r"\.")) as refused:
        TopicMarks(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)).owner()
    assert refused.value.setting == named


def test_a_topic_that_is_not_there_is_refused(broker):
    with pytest.raises(MarksTopicUnfit, match=r"make it with 1 partition and cleanup\.policy=compact"):
        TopicMarks(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic="marks-none")).owner()


KILLED = """
import os, signal, sys
from pushrep.kafka import KafkaDestination, store_topic
from spark_jobs.batch_marks import BatchMarks
from spark_jobs.topic_marks import TopicMarks

def killed(*args, **more):
    send(*args, **more)
    os.kill(os.getpid(), signal.SIGKILL)

store = TopicMarks(KafkaDestination(bootstrap_servers=sys.argv[1], topic=sys.argv[2]))
assert store.batches("q") == [0]
send, store_topic.send = store_topic.send, killed
store.write(BatchMarks("q", 1), keep=1)
"""


def test_who_is_killed_within_a_commit_leaves_the_batch_before(broker, topic, opened):
    """Parts and seal are on the broker, but the transaction is open: none of them counts, and no reader waits for
    it.
    """
    opened().write(marks_of("q", 0), keep=9)
    killed = subprocess.run([sys.executable, "-c", KILLED, broker.bootstrap_servers, topic], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    store = opened()
    assert (store.batches("q"), store.read("q", 0)) == ([0], marks_of("q", 0))
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic)
    with closing(CommittedRecords(destination, look_at_topic(destination, topic), lambda: 10.0)) as records:
        assert not records.has_open_change(), "decided at the first look"
    store.write(marks_of("q", 1, 3), keep=9)
    assert opened().read("q", 1) == marks_of("q", 1, 3)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_commit_whose_answer_was_lost_is_there_once(broker, topic, opened, producers, is_done):
    store = opened()
    store.write(marks_of("q", 0), keep=9)
    producers.lost = is_done
    store.write(marks_of("q", 1), keep=9)
    assert opened().batches("q") == [0, 1]
    keys = [seen.key for seen in consume(broker.bootstrap_servers, topic)]
    assert keys.count(b"q/1") == (1 if is_done else 2), "the consumer reads what was aborted too"


def test_a_commit_that_could_not_be_asked_about_is_known_as_ours_later(opened, producers):
    store = opened()
    store.write(marks_of("q", 0), keep=9)
    producers.lost, producers.away = True, KafkaUnreachable("pulled")
    with pytest.raises(KafkaUnreachable, match="pulled"):
        store.write(marks_of("q", 1), keep=9)
    producers.away = None
    store.write(marks_of("q", 1, 7), keep=9)
    assert (store.batches("q"), store.read("q", 1)) == ([0, 1], marks_of("q", 1, 7))


def test_brokers_that_are_away_are_said_so_and_the_same_store_goes_on(broker, topic, torture):
    if not torture.is_long:
        pytest.skip("answers that are lost, above, are the short form")
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic, request_timeout_ms=2000)
    with TopicMarks(destination) as store:
        store.write(marks_of("q", 0), keep=9)
        broker.kill()
        try:
            with pytest.raises(KafkaUnreachable):
                store.write(marks_of("q", 1), keep=9)
        finally:
            broker.start()
            broker.wait_ready()
        again = Retrying(retry=retry_if_exception_type(KafkaUnreachable), stop=stop_after_delay(60), reraise=True)
        assert again(store.batches, "q") == [0]
        again(store.write, marks_of("q", 1), keep=9)
        assert again(store.read, "q", 1) == marks_of("q", 1)


def test_records_of_others_are_refused_by_name(broker, topic, opened):
    opened().write(marks_of("q", 0), keep=9)
    send(plain_producer(broker.bootstrap_servers), topic, [(b"q/0", b"mine")])
    with pytest.raises(MarksStoreDamaged, match="use another topic"):
        opened().read("q", 0)


def test_a_part_that_is_gone_is_never_taken_for_less_marks(broker, topic, opened):
    store = opened()
    store.write(marks_of("q", 0), keep=9)
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic)
    with closing(KeyedTopic.open(destination, name=FORMAT, version=VERSION)) as map_:
        map_.look()
        map_.change([("q/0/0", None)])
    with pytest.raises(MarksStoreDamaged, match=r"q/0 are not what its seal says"):
        opened().read("q", 0)


def test_the_command_shows_exports_imports_and_resets(broker, topic, opened, tmp_path):
    """`pushrep marks show | export | import | reset` on a topic."""
    place = ("--bootstrap-servers", broker.bootstrap_servers)
    for batch in range(2):
        opened().write(marks_of("q", batch, batch), keep=9)
    run = CliRunner().invoke
    assert json.loads(run(marks_command, ["show", f"kafka:{topic}", *place, "--json"]).output)["batches"] == [0, 1]
    done = run(marks_command, ["reset", f"kafka:{topic}", *place, "--export", str(tmp_path / "out"), "--yes"])
    assert done.exit_code == 0, done.output
    assert BatchMarks.from_bytes((tmp_path / "out").read_bytes()) == marks_of("q", 1, 1)
    assert opened().owner() is None
    done = run(marks_command, ["import", f"kafka:{topic}", str(tmp_path / "out"), *place])
    assert "--adopt q:1" in done.output, done.output
    done = run(marks_command, ["export", f"kafka:{topic}", str(tmp_path / "again"), *place])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes(), done.output
    refused = run(marks_command, ["import", f"kafka:{topic}", str(tmp_path / "out"), *place])
    assert "has marks of query q" in refused.output
    refused = run(marks_command, ["show", f"kafka:{topic}"])
    assert (refused.exit_code, "--bootstrap-servers HOST:PORT" in refused.output) == (1, True)
    refused = run(marks_command, ["show", str(tmp_path), *place])
    assert "are for kafka:TOPIC" in refused.output
