"""What ReplayFilteredBatches needs of each marks store: one suite for all stores."""

import dataclasses

import pytest

from filtering import HighwaterMarks
from spark_jobs import FileMarks, ReplayFilteredBatches, file_marks
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksFenced, MarksKey

pytestmark = pytest.mark.spark


@pytest.fixture(params=["this machine", "Spark's file system"])
def open_store(request, tmp_path, spark, monkeypatch):
    """Opens the same store again each time."""
    if request.param != "this machine":
        monkeypatch.setattr(file_marks, "local_path", lambda _: None)
    return lambda: FileMarks(str(tmp_path / "m"), spark)


def marks_of(query, batch, offset=0):
    marks = HighwaterMarks.from_columns([7], [0], [offset], [0])
    return BatchMarks(query, batch, (LogRange("t", 0, 0, offset + 1),), {MarksKey("t"): marks})


def test_an_empty_store_belongs_to_nobody(open_store):
    store = open_store()
    assert store.owner() is None
    assert store.batches("q") == []
    assert store.read("q", 0) is None


def test_what_was_written_is_there_again(open_store):
    store = open_store()
    for batch in range(3):
        store.write(marks_of("q", batch, batch * 10), keep=5)
    assert store.read("q", 1) == marks_of("q", 1, 10)
    store = open_store()
    assert store.owner() == "q"
    assert store.batches("q") == [0, 1, 2]
    assert store.read("q", 1) == marks_of("q", 1, 10)
    assert store.read("q", 3) is None


def test_the_last_word_on_a_batch_counts(open_store):
    store = open_store()
    store.write(marks_of("q", 0, 1), keep=5)
    store.write(marks_of("q", 0, 2), keep=5)
    assert open_store().read("q", 0) == marks_of("q", 0, 2)


def test_dropped_batches_stay_dropped_until_they_are_written_again(open_store):
    store = open_store()
    store.write(marks_of("old", 7), keep=9)
    for batch in range(4):
        store.write(marks_of("q", batch), keep=9)
    store.drop_from("q", 2)
    store = open_store()
    assert (store.batches("q"), store.batches("old"), store.owner()) == ([0, 1], [7], "q")
    store = open_store()
    store.write(marks_of("q", 2, 5), keep=9)
    assert open_store().read("q", 2) == marks_of("q", 2, 5)


def test_versions_are_kept_and_another_querys_go_once_this_one_has_enough(open_store):
    store = open_store()
    store.write(marks_of("old", 7), keep=2)
    for batch in range(7, 12):  # 7 is what it adopted
        store.write(dataclasses.replace(marks_of("q", batch), first=8), keep=2)
        assert (bool(store.batches("old")), store.owner()) == (batch < 10, "q")
    assert store.batches("q") == [10, 11]
    assert store.owner() == "q"


def test_the_filter_goes_on_with_it(open_store, frames, logs, inside_query):
    inside_query("q")
    rows = logs.random_topic(12)
    kept = {}

    def handler(frame, batch_id):
        kept[batch_id] = {row["value"] for row in frame.select("value").collect()}

    for n, part in enumerate((rows[:30], rows[30:60], rows[60:])):
        ReplayFilteredBatches(handler, open_store())(frames.split(part, 2), n)
    assert set().union(*kept.values()) == logs.Model().kept(rows)


def test_of_two_drivers_whose_marks_are_files_the_slower_is_refused(tmp_path, spark, frames, logs, inside_query):
    """The slower driver has read the marks, and then finds that the other has written; from then on each call is
    refused.
    """
    inside_query("q")
    rows = logs.random_topic(12)
    slower, handed = FileMarks(str(tmp_path / "m"), spark), []

    def meanwhile(frame, batch_id):
        handed.append(batch_id)
        ReplayFilteredBatches(lambda *_: None, FileMarks(str(tmp_path / "m"), spark))(frames.split(rows, 2), batch_id)

    with pytest.raises(MarksFenced, match="by another driver while batch 0 of query q ran"):
        ReplayFilteredBatches(meanwhile, slower)(frames.split(rows, 2), 0)
    with pytest.raises(MarksFenced):
        ReplayFilteredBatches(meanwhile, slower)(frames.split(rows, 2), 1)
    assert handed == [0], "the next batch does not reach the handler"
    assert FileMarks(str(tmp_path / "m"), spark).batches("q") == [0]
