"""A job's topic that was made anew, compacted, grown or emptied: each record once, or refused by name before a row.

Contract "faults", F6. Judged by what a plain consumer reads of the topic, and by the rows of the table.
"""

import uuid
from threading import Thread

import pyarrow.dataset as ds
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from filtering import StreamMetadata
from tests.kafka.plain_client import add_partitions, alter_topic, consume, create_topic, plain_producer
from tests.kafka.spark_driver import OrderFailed, table
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

JOBS = ("apply", "relay")
PID = 7


class Job:
    """One of the two jobs over a topic of one partition; `.reached()` is what came out of it, by value."""

    def __init__(self, name, driver, servers, place):
        self.name, self._driver, self.servers, self.place = name, driver, servers, place
        tag = uuid.uuid4().hex[:8]
        self.topic, self.destination = f"source-{tag}", f"source-{tag}-out"
        create_topic(servers, self.topic)
        if name == "relay":
            create_topic(servers, self.destination)
        self._next = {}

    def write(self, count, partition=0, *, first=None):
        producer = plain_producer(self.servers)
        begin = self._next.get(partition, 0) if first is None else first
        for n in range(begin, begin + count):
            producer.produce(self.topic, b"%d-%d" % (partition, n), StreamMetadata(PID, partition, n).pack(), partition)
        assert producer.flush(60) == 0
        self._next[partition] = begin + count

    def make_anew(self):
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        admin.delete_topics([self.topic])[self.topic].result(60)
        create_topic(self.servers, self.topic)

    def run(self, *more):
        own = ("--sink", f"{self.place}/table", "--keep", "topic,partition,offset")
        if self.name == "relay":
            own = ("--to-topic", self.destination, "--application", "billing", "--to-option", "log_level=0")
        return self._driver.job(
            name=self.name,
            arguments=[
                *("--source", "kafka", "--source-option", f"kafka.bootstrap.servers={self.servers}"),
                *("--topic", self.topic, "--checkpoint", f"{self.place}/checkpoint", *own, *more),
            ],
        )

    def passes(self):
        code, said = self.run()
        assert code == 0, said

    def refused(self, *words, run=None):
        before = self.reached(), self.places()
        code, said = run() if run is not None else self.run()
        assert code == 1, said
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, said
        assert not [word for word in words if word not in lines[0]], lines[0]
        assert (self.reached(), self.places()) == before, "a refusal writes nothing"

    def reached(self):
        """The values that came out, in order of the source; a value that came twice is an error for a table."""
        if self.name == "relay":
            visible = read_filtered(self.servers, self.destination, 1).visible
            return sorted(one.value for seen in visible.values() for one in seen)
        if not [*self.place.glob("table/batch_id=*")]:
            return []
        return sorted(ds.dataset(self.place / "table", format="parquet").to_table(["value"])["value"].to_pylist())

    def places(self):
        return sorted(path.name for path in self.place.iterdir() if path.is_dir())


def values(count, partition=0, first=0):
    return sorted(b"%d-%d" % (partition, n) for n in range(first, first + count))


@pytest.fixture(params=JOBS)
def job(request, spark_driver, broker, tmp_path):
    return Job(request.param, spark_driver, broker.bootstrap_servers, tmp_path)


def test_a_topic_that_was_made_anew_is_refused_at_the_start(job):
    """Without it the job kept 3 of the 9 new records, above the offset where it had stopped, and ended with 0."""
    job.write(6)
    job.passes()
    assert job.reached() == values(6)
    job.make_anew()
    job.write(9, first=100)
    job.refused("--topic", job.topic, "made anew")


def test_a_topic_that_is_made_anew_below_a_running_job_is_refused(job):
    job.write(6)
    seen = []
    runs = Thread(target=lambda: seen.append(job.run("--trigger", "200ms")))
    runs.start()
    while len(job.reached()) < 6:
        assert runs.is_alive(), seen
    job.make_anew()
    job.write(9, first=100)
    runs.join(120)
    job.refused("--topic", job.topic, run=lambda: seen[0])
    assert job.reached() == values(6), "none of the new topic's records"


def test_a_compacted_topic_is_refused_before_anything_is_written(job):
    alter_topic(job.servers, job.topic, cleanup_policy="compact,delete")
    job.write(6)
    job.refused("--topic", job.topic, "cleanup.policy=compact,delete")
    assert job.places() == []


def test_partitions_that_are_added_are_read_from_their_start(job):
    job.write(4)
    job.passes()
    add_partitions(job.servers, job.topic, 2)
    job.write(3)
    job.write(5, partition=1)
    job.passes()
    assert job.reached() == values(7) + values(5, partition=1)


def test_a_topic_that_was_emptied_loses_nothing_that_was_read_and_is_refused_otherwise(job):
    job.write(6)
    job.passes()
    empty(job.servers, job.topic)
    job.write(3)
    job.passes()
    assert job.reached() == values(9)
    job.write(5)
    empty(job.servers, job.topic)
    job.write(2)
    job.refused("offset=9", "out of range", f"{job.topic}-0")
    assert job.reached() == values(9)


@pytest.mark.parametrize("form", ["batches", "operator"])
def test_a_query_of_one_s_own_over_a_topic_that_grows_and_is_emptied(spark_driver, broker, tmp_path, form):
    job = Job("apply", spark_driver, broker.bootstrap_servers, tmp_path)
    options = {"kafka.bootstrap.servers": job.servers, "subscribe": job.topic, "startingOffsets": "earliest"}
    query = {"place": tmp_path, "form": form, "options": options}
    job.write(4)
    spark_driver.run(**query)
    add_partitions(job.servers, job.topic, 2)
    job.write(3)
    job.write(5, partition=1)
    spark_driver.run(**query)
    rows = {(job.topic, 0, n) for n in range(7)} | {(job.topic, 1, n) for n in range(5)}
    assert table(tmp_path) == rows
    job.write(5)
    empty(job.servers, job.topic)
    job.write(2)
    with pytest.raises(OrderFailed, match=f"out of range for partition {job.topic}-0"):
        spark_driver.run(**query)
    assert table(tmp_path) == rows, "not a row of the batch that lacks some"


def empty(servers, topic):
    """Delete all records of partition 0."""
    end = consume(servers, topic)[-1].offset + 1
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    [done] = admin.delete_records([TopicPartition(topic, 0, end)]).values()
    assert done.result(60).low_watermark == end
