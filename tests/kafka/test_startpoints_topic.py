"""The store in a compacted topic, on a real broker: what the one in a directory is shown to do, and what is its own."""

import inspect
import itertools
import json
import signal
import subprocess
import sys
import threading

import pytest

from pushrep.errors import CorruptFile
from pushrep.kafka import KafkaDestination
from pushrep.kafka.startpoints import FORMAT
from pushrep.startpoints import (
    Applied,
    LogFacts,
    PartitionLost,
    Startpoint,
    StartpointRefused,
    State,
    StoreUnavailable,
)
from tests.kafka.plain_client import consume, create_topic, plain_producer, send
from tests.support.simulated_disk import SimulatedClock
from tests.unit import test_startpoints_store as directory_store

pytestmark = [pytest.mark.java, pytest.mark.slow]
LOG = LogFacts(start=10, end=100, first_at=lambda ms: None, log_id="a")
_names = (f"startpoints-{number}" for number in itertools.count())


def opened(broker, topic, clock=None):
    from pushrep.kafka.startpoints import open_store

    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic)
    return open_store(destination, clock=clock or SimulatedClock())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return name


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def store(broker, topic, clock):
    with opened(broker, topic, clock) as store:
        yield store


def test_the_sequence_is_the_offset_and_in_each_key(broker, topic, store):
    """sequence = the record's offset, the key includes it."""
    first = store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    second = store.write("billing", "orders", 0, Startpoint.latest(), "no, there")
    store.cancel(first, "over")
    keys = {seen.offset: seen.key.decode() for seen in consume(broker.bootstrap_servers, topic)}
    assert (keys[first], keys[second]) == (f"written/{first}", f"written/{second}")
    assert f"cancelled/{first}" in keys.values()
    assert first < second


@pytest.mark.parametrize("settings", [{"cleanup_policy": "delete"}, {"cleanup_policy": "compact", "partitions": 2}])
def test_a_topic_that_would_forget_is_refused_by_name(broker, settings):
    create_topic(broker.bootstrap_servers, name := next(_names), **settings)
    with pytest.raises(StoreUnavailable, match=r"cleanup\.policy=compact|1 partition"):
        opened(broker, name)
    with pytest.raises(StoreUnavailable, match="no such topic"):
        opened(broker, "startpoints-none")


def of_any_store():
    """The directory store's tests that look at no disk, nor at refusals before any store is asked: here with ours."""
    for name, test in vars(directory_store).items():
        if name.startswith("test_") and not name.endswith("refused_by_name"):
            wanted = inspect.signature(test).parameters
            if "store" in wanted and not {"disk", "real"} & set(wanted):
                yield name, test


SHARED = dict(of_any_store())
globals().update(SHARED)


def test_one_suite_is_for_both_stores():
    assert len(SHARED) > 25
    assert "test_who_lost_the_partition_can_do_nothing" in SHARED


def test_compaction_takes_replaced_checkpoints_only(broker, topic, store):
    claim = store.claim("billing", "orders", 0)
    for offset in (60, 70):
        store.commit(claim, offset)
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    store.start(claim, LOG)
    store.start(claim, LOG)
    store.commit(claim, 30, sequence=sequence)
    store.consume(claim, sequence)
    store.consume(claim, sequence)
    keys = [seen.key.decode() for seen in consume(broker.bootstrap_servers, topic)]
    facts = [key for key in keys if not key.startswith("checkpoint/")]
    reader = "billing/orders/0/"
    assert facts == [
        "format",
        f"written/{sequence}",
        f"applied/{sequence}/{reader}",
        f"consumed/{sequence}/{reader}",
    ]
    assert keys.count(f"checkpoint/{reader}") == 4


def test_writers_that_take_turns_see_each_other(broker, topic):
    """A writer reads up to its own record before it uses it; who was fenced does it again and loses nothing."""
    with opened(broker, topic) as one, opened(broker, topic) as other:
        written = [
            store.write("billing", "orders", 0, Startpoint.specific(20 + number), "go")
            for number, store in enumerate([one, other, one, other, one])
        ]
        assert written == sorted(set(written))
        assert one.history() == other.history()
        assert [fact.sequence for fact in one.history()] == written
        old, new = one.claim("billing", "orders", 0), other.claim("billing", "orders", 0)
        with pytest.raises(PartitionLost):
            one.start(old, LOG)
        assert other.start(new, LOG).offset == 24


def test_the_first_applied_in_log_order_wins(broker, topic):
    with opened(broker, topic) as writer:
        sequence = writer.write("billing", "orders", 0, Startpoint.latest(), "go")
        claim = writer.claim("billing", "orders", 0)
    offsets = []

    def apply(end):
        with opened(broker, topic) as store:
            log = LogFacts(start=10, end=end, first_at=lambda ms: None, log_id="a")
            offsets.append(store.apply(claim, log).offset)

    threads = [threading.Thread(target=apply, args=(end,)) for end in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(offsets) == 3
    assert len(set(offsets)) == 1, "resolved once, and all use that"
    with opened(broker, topic) as store:
        [applied] = [fact for fact in store.history() if isinstance(fact, Applied)]
        assert (applied.sequence, applied.offset) == (sequence, offsets[0])


WRITER = """
import sys
from pushrep.kafka import KafkaDestination
from pushrep.kafka.startpoints import open_store
from pushrep.startpoints import Startpoint

servers, topic, consumer = sys.argv[1:]
with open_store(KafkaDestination(bootstrap_servers=servers, topic=topic), lock_wait_s=120) as store:
    for offset in range(5):
        print(store.write(consumer, "orders", 0, Startpoint.specific(offset), "go"), flush=True)
"""


def test_writers_in_several_processes_lose_nothing(broker, topic):
    """Concurrent writers: each returned sequence is there once, and has its writer's startpoint."""
    consumers = ("billing", "audit", "report")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, broker.bootstrap_servers, topic, name], stdout=subprocess.PIPE, text=True
        )
        for name in consumers
    ]
    told = [[int(line) for line in writer.communicate(timeout=200)[0].split()] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    with opened(broker, topic) as store:
        for name, sequences in zip(consumers, told, strict=True):
            mine = [fact for fact in store.history() if fact.target.consumer == name]
            assert [fact.sequence for fact in mine] == sequences
            assert [fact.startpoint.value for fact in mine] == list(range(5))


KILLED = """
import os, signal, sys
from pushrep.kafka import KafkaDestination, startpoints
from pushrep.startpoints import Startpoint

def killed(*args, **more):
    send(*args, **more)
    os.kill(os.getpid(), signal.SIGKILL)

store = startpoints.open_store(KafkaDestination(bootstrap_servers=sys.argv[1], topic=sys.argv[2]))
send, startpoints.send = startpoints.send, killed
store.write("billing", "orders", 0, Startpoint.specific(30), "never told")
"""


def test_who_is_killed_within_a_change_leaves_nothing_and_holds_nobody(broker, topic, store):
    first = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    killed = subprocess.run([sys.executable, "-c", KILLED, broker.bootstrap_servers, topic], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert store.read("billing", "orders", 0).sequence == first
    second = store.write("billing", "orders", 0, Startpoint.specific(40), "go")
    assert [fact.sequence for fact in store.history()] == [first, second]
    assert store.read("billing", "orders", 0).state is State.PENDING


def test_a_first_writer_that_is_stopped_within_its_first_change_leaves_an_empty_store(broker, topic, store):
    """Its format record has an offset but is aborted: the next writer has to write the format."""
    stopped = plain_producer(broker.bootstrap_servers, transactional_id=f"pushrep-startpoints-{topic}")
    stopped.init_transactions(120)
    stopped.begin_transaction()
    send(stopped, topic, [(b"format", json.dumps(FORMAT).encode())])
    first = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    with opened(broker, topic) as other:
        second = other.write("billing", "orders", 0, Startpoint.specific(30), "no, there")
        for one in (store, other):
            assert [fact.sequence for fact in one.history()] == [first, second]
    keys = [seen.key for seen in consume(broker.bootstrap_servers, topic)]
    assert keys.count(b"format") == 2, "the consumer reads what was aborted too"


@pytest.mark.parametrize("is_done", [True, False])
def test_what_became_of_an_unanswered_commit_is_looked_up(producers, store, is_done):
    first = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    producers.lost = is_done
    if is_done:
        second = store.write("billing", "orders", 0, Startpoint.specific(30), "go")
        assert [fact.sequence for fact in store.history()] == [first, second]
    else:
        with pytest.raises(StoreUnavailable, match="nothing was written"):
            store.write("billing", "orders", 0, Startpoint.specific(30), "go")
        assert [fact.sequence for fact in store.history()] == [first]
    assert store.write("billing", "orders", 0, Startpoint.specific(40), "go") > first


@pytest.mark.parametrize("value", [b'{"event": "written"}', b"[" * 100_000, b'{"event": 1e999}', b"\xff", b"[]"])
def test_records_of_others_are_refused_by_name(broker, topic, store, value):
    store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    send(plain_producer(broker.bootstrap_servers), topic, [(b"written/7", value)])
    with pytest.raises(CorruptFile, match="use another topic"):
        store.read("billing", "orders", 0)
    with pytest.raises(CorruptFile, match="use another topic"):
        store.write("billing", "orders", 0, Startpoint.specific(20), "go")


def test_after_close_everything_raises_here_too(store):
    claim = store.claim("billing", "orders", 0)
    store.close()
    store.close()
    for use in (
        lambda: store.write("billing", "orders", 0, Startpoint.earliest(), "go"),
        lambda: store.start(claim, LOG),
        store.history,
        store.size_bytes,
    ):
        with pytest.raises(StartpointRefused):
            use()
