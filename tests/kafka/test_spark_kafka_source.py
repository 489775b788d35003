"""The filter over Spark's own Kafka source, held against brute force over what a plain consumer reads of the topic.

Contract "Spark": two forms, same results, whatever cuts the batches; and "The rule".
"""

import json
import shutil
import uuid
from functools import partial

import pytest

from spark_jobs import FileMarks
from tests.kafka.mixed_topics import SQE_PID, MixedTopic, brute_force
from tests.kafka.plain_client import add_partitions, create_topic
from tests.kafka.spark_driver import OrderFailed, by_batch, table

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

FOLLOW = {"processingTime": "0 seconds"}
BOTH = ("batches", "operator")
SHORT_RECORDS = 260  # of the topic that most of the short forms read


@pytest.fixture(scope="module")
def driver(spark_driver):
    return spark_driver


@pytest.fixture(scope="module")
def servers(broker):
    return broker.bootstrap_servers


class Mixed:
    """Some topics, filled; `.options` to read all of them."""

    def __init__(self, servers, rng, count=1, partitions=3, carrier="key", records=160):
        self.servers, self.carrier, self.records = servers, carrier, records
        names = [f"mixed-{uuid.uuid4().hex[:8]}" for _ in range(count)]
        for name in names:
            create_topic(servers, name, partitions=partitions)
        self.partitions = dict.fromkeys(names, partitions)
        self.topics = [MixedTopic(servers, name, partitions, rng, carrier) for name in names]
        for _ in range(2):
            for topic in self.topics:
                topic.rewind()
            self.write(records // 2)
        judged = brute_force(servers, self.partitions, carrier)
        kept, dropped = len(judged.kept), judged.dropped
        assert min(kept, dropped) > (kept + dropped) // 20, f"{kept} to keep and {dropped} to drop: both are drawn"

    def limit(self, offsets):
        """The limit of a batch in the short form; it grows with the topic, so that the long form does not take longer
        for it.
        """
        return {"maxOffsetsPerTrigger": str(offsets * max(1, self.records // SHORT_RECORDS))}

    def write(self, records):
        for topic in self.topics:
            topic.write(records)

    def grow(self, partitions):
        for topic in self.topics:
            add_partitions(self.servers, topic.topic, partitions)
            topic.grow(partitions)
            self.partitions[topic.topic] = partitions

    @property
    def options(self):
        return {
            "kafka.bootstrap.servers": self.servers,
            "kafka.isolation.level": "read_committed",
            "subscribe": ",".join(self.partitions),
            "startingOffsets": "earliest",
            "includeHeaders": str(self.carrier == "header").lower(),
        }

    def expected(self, **rule):
        return brute_force(self.servers, self.partitions, self.carrier, **rule).kept


@pytest.fixture(scope="module")
def one_topic(servers, torture):
    return Mixed(servers, torture.random("one topic"), records=torture.count(SHORT_RECORDS, 5000))


@pytest.fixture(scope="module")
def many_topics(servers, torture):
    return Mixed(servers, torture.random("many"), 3, carrier="header", records=torture.count(90, 2000))


SPLITS = {
    "batches": ("batches", {"minPartitions": "7", "maxRecordsPerPartition": "17"}),
    "the operator": ("operator", {"minPartitions": "4", "maxRecordsPerPartition": "40"}),
}
LONG_SPLITS = {
    f"{form}, {', '.join(split)}": (form, split)
    for form in BOTH
    for split in (
        {"minPartitions": "9"},
        {"maxRecordsPerPartition": "23"},
        {"maxOffsetsPerTrigger": "1500"},
        {"minPartitions": "9", "maxRecordsPerPartition": "61", "maxOffsetsPerTrigger": "2000"},
        {"minOffsetsPerTrigger": "700", "maxTriggerDelay": "1s", "maxOffsetsPerTrigger": "2500"},
    )
}


@pytest.mark.parametrize("name", SPLITS)
def test_whatever_cuts_batches_and_tasks_changes_nothing(driver, one_topic, tmp_path, name):
    """Contract "The rule": batch boundaries anywhere, splits and shuffles change nothing."""
    form, options = SPLITS[name]
    driver.run(place=tmp_path, form=form, options=one_topic.options | options | one_topic.limit(170))
    assert table(tmp_path) == one_topic.expected()
    assert len(by_batch(tmp_path)) > 1, "the limit cut the topic into batches"


@pytest.mark.timeout(1800)
def test_every_split_of_both_forms_in_the_long_run(driver, one_topic, tmp_path, torture):
    if not torture.is_long:
        pytest.skip("the two splits above are the short form")
    for number, (form, options) in enumerate(LONG_SPLITS.values()):
        driver.run(place=tmp_path / str(number), form=form, options=one_topic.options | options)
        assert table(tmp_path / str(number)) == one_topic.expected(), (form, options)


def test_many_topics_in_one_query_and_the_header_carrier(driver, many_topics, tmp_path):
    """Contract "The rule": per (destination topic, PID, source partition); of several headers the last counts."""
    rule = {"carrier": "header", "window": 3}
    driver.run(place=tmp_path, rule=rule, options=many_topics.options | {"minPartitions": "12"})
    assert table(tmp_path) == many_topics.expected(window=3)


@pytest.mark.parametrize("form", BOTH)
def test_a_batch_frame_of_the_same_topics(driver, many_topics, tmp_path, form, torture):
    """Contract "Spark": both forms also accept a batch DataFrame (backfills)."""
    if not torture.is_long:
        pytest.skip("frames that no broker serves are the short form: tests/spark/replay/test_filter_frames.py")
    rule = {"carrier": "header", "window": 3}
    driver.backfill(place=tmp_path, form=form, rule=rule, options=many_topics.options | {"minPartitions": "12"})
    assert table(tmp_path) == many_topics.expected(window=3)


def test_a_query_that_waits_for_enough_records_and_selects_pids(driver, many_topics, tmp_path):
    """minOffsetsPerTrigger holds a batch back until maxTriggerDelay is over."""
    waits = {"minOffsetsPerTrigger": "100000", "maxTriggerDelay": "1s"}
    rule = {"carrier": "header", "only_pids": [SQE_PID]}
    driver.start(place=tmp_path, rule=rule, trigger=FOLLOW, options=many_topics.options | waits)
    driver.catch_up(place=tmp_path)
    driver.stop(place=tmp_path)
    assert table(tmp_path) == many_topics.expected(only_pids=[SQE_PID])


def test_partitions_that_are_added_while_it_runs(driver, servers, tmp_path, torture):
    mixed = Mixed(servers, torture.random("grows"), partitions=2, records=60)
    driver.start(place=tmp_path, trigger=FOLLOW, options=mixed.options)
    driver.catch_up(place=tmp_path)
    assert table(tmp_path) == mixed.expected()
    for partitions in range(3, torture.count(5, 9), 2):
        mixed.grow(partitions)
        mixed.write(60)
        driver.catch_up(place=tmp_path)
        assert table(tmp_path) == mixed.expected()
    driver.stop(place=tmp_path)
    assert {partition for _, partition, _ in table(tmp_path)} == set(range(partitions))


def roll_back(place, to):
    """Roll back as an operator does: remove from the checkpoint what Spark planned and did after batch `to`."""
    for log in ("offsets", "commits"):
        for path in (place / "checkpoint" / log).iterdir():
            number = path.name.removeprefix(".").removesuffix(".crc")
            if number.isdigit() and int(number) > to:
                path.unlink()


@pytest.mark.parametrize("form", BOTH)
def test_a_checkpoint_that_was_rolled_back_by_some_batches(driver, one_topic, tmp_path, form, torture):
    """Contract "Spark": marks versions from there on, and what the table has of these batches, are dropped first."""
    if not torture.is_long:
        pytest.skip("the short form rolls back a query that was killed, below")
    rolls = partial(driver.run, place=tmp_path, form=form)
    rolls(options=one_topic.options | one_topic.limit(70))
    assert table(tmp_path) == one_topic.expected()
    before = by_batch(tmp_path)
    assert max(before) > 2
    roll_back(tmp_path, to=1)
    if form == "operator":  # whoever rolls back a query that has no marks of its own clears its table, too
        for path in (tmp_path / "table").glob("batch_id=*"):
            if int(path.name.partition("=")[2]) > 1:
                shutil.rmtree(path)
    rolls(options=one_topic.options | one_topic.limit(110))
    assert table(tmp_path) == one_topic.expected()
    after = by_batch(tmp_path)
    assert (after[0], after[1]) == (before[0], before[1])
    assert after[2] != before[2], "planned anew, in other batches"


def test_a_fresh_checkpoint_adopts_the_marks_of_another(driver, one_topic, tmp_path, torture):
    """Contract "Spark": `adopt=(query, batch)` starts a fresh checkpoint from another's marks; `initialState` too."""
    old, limit = tmp_path / "old", one_topic.limit(100)
    query_id = driver.run(place=old, options=one_topic.options | limit)
    store = FileMarks(old / "marks")
    done = [store.read(query_id, batch) for batch in (0, 1)]
    ends = {}
    for read in (r for batch in done for r in batch.ranges):
        ends.setdefault(read.topic, {})[str(read.partition)] = read.end
    [topic] = one_topic.partitions
    for partition in range(one_topic.partitions[topic]):
        ends[topic].setdefault(str(partition), 0)
    before = {row for batch, rows in by_batch(old).items() if batch < 2 for row in rows}
    goes_on = {"startingOffsets": json.dumps(ends), **limit}
    adopts = {"adopt": [query_id, 1], "marks": old / "marks"}
    if torture.is_long:
        place = tmp_path / "operator"
        driver.run(place=place, form="operator", options=one_topic.options | goes_on, **adopts)
        assert table(place) | before == one_topic.expected()
        assert not table(place) & before
    driver.run(place=tmp_path / "new", options=one_topic.options | goes_on, table=old / "table", **adopts)
    assert table(old) == one_topic.expected()


def test_killed_between_rows_and_marks(driver, one_topic, tmp_path, torture):
    """Contract "Where marks live": the batch runs again; N > 0 without N-1 is an error.

    The whole driver is killed in the long form; the query alone ends in the short one.
    Contract "Spark": rolled back by some batches, marks and rows from there on are dropped, and Spark plans anew.
    """
    query = {"place": tmp_path}
    small, large = (one_topic.options | one_topic.limit(offsets) for offsets in (100, 140))
    with pytest.raises(OrderFailed, match="the driver has ended" if torture.is_long else "it ends here"):
        driver.run(**query, options=small, die_at=1, killed=torture.is_long)
    rows = by_batch(tmp_path)
    assert sorted(rows) == [0, 1], "the rows were there"
    if torture.is_long:
        driver.restart()
    store = FileMarks(tmp_path / "marks")
    query_id = store.owner()
    assert store.batches(query_id) == [0], "their marks were not"
    driver.run(**query, options=small)
    before = by_batch(tmp_path)
    assert table(tmp_path) == one_topic.expected()
    assert before[1] == rows[1], "the same rows again"

    roll_back(tmp_path, to=0)
    driver.run(**query, options=large)
    assert table(tmp_path) == one_topic.expected()
    assert by_batch(tmp_path)[0] == before[0]
    assert by_batch(tmp_path)[1] != before[1], "planned anew, in other batches"

    store = FileMarks(tmp_path / "marks")
    store.drop_from(query_id, 0)
    roll_back(tmp_path, to=0)
    with pytest.raises(OrderFailed, match=f"lack batch 0 of query {query_id}"):
        driver.run(**query, options=large)
