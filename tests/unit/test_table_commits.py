"""What the commits of a Delta or Iceberg table show about a repair, and which histories are refused."""

import json

import pytest

pytest.importorskip("pyspark")

from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantUndo
from spark_jobs.sinks.table_commits import BatchRecord, Commit, Repair, repair_in

QUERY, NUMBER = "q", 3


def batch(version, *ranges, replaced=(), query=QUERY, operation="WRITE"):
    """The commit of a batch; a range is (partition, start, end, startpoint epoch)."""
    of = [[LogRange("t", *one) for one in some] for some in (ranges, replaced)]
    text = json.dumps(BatchRecord(query, "run", version, *of)._asdict())
    return Commit(version, operation, text)


def again(version, start, end, *more, query=QUERY):
    """A batch of the repair."""
    part = (0, start, end, NUMBER)
    return batch(version, part, *more, replaced=[part], query=query)


def other(version, operation, text=None):
    return Commit(version, operation, text)


def undone(version, query=QUERY, number=NUMBER):
    options = Repair(query, number, (), 0, is_undone=False).undo_options("delta", {"author": "ann", "reason": "worse"})
    return other(version, "WRITE", options["userMetadata"])


BEGUN = [other(0, "CREATE TABLE"), batch(1, (0, 0, 10, 0), (1, 0, 10, 0)), batch(2, (0, 10, 20, 0), (1, 10, 20, 0))]
REPAIRED = [*BEGUN, again(3, 5, 12), batch(4, (1, 20, 30, 0)), again(5, 12, 20, (0, 20, 25, NUMBER))]
RANGES = (LogRange("t", 0, 5, 12, NUMBER), LogRange("t", 0, 12, 20, NUMBER))


def found_in(commits):
    return repair_in(reversed(commits), "orders", QUERY, NUMBER)


@pytest.mark.parametrize(
    "since",
    [
        [],
        [batch(6, (0, 25, 40, NUMBER))],
        [other(6, "OPTIMIZE"), other(7, "VACUUM START"), other(8, "VACUUM END"), other(9, "SET TBLPROPERTIES")],
        [other(6, "replace")],
        [batch(6, (0, 0, 9, 1), query="another")],
        [batch(6, (1, 5, 20, 4), replaced=[(1, 5, 20, 4)])],
    ],
    ids=["at once", "new records", "kept by Delta", "kept by Iceberg", "another query's batch", "other partitions"],
)
def test_a_repair_is_what_its_batches_replaced_and_the_version_before_the_first_of_them(since):
    assert found_in([*REPAIRED, *since]) == Repair(QUERY, NUMBER, RANGES, 2, is_undone=False)


@pytest.mark.parametrize(
    ("since", "why"),
    [
        ([other(6, "UPDATE")], "version 6, UPDATE, came after"),
        ([other(6, "DELETE"), batch(7, (0, 25, 40, NUMBER))], "version 6, DELETE"),
        ([batch(6, (0, 5, 9, 8), replaced=[(0, 5, 9, 8)], query="another")], "version 6, WRITE"),
        ([again(6, 5, 9, query="another")], "version 6, WRITE"),
        ([batch(6, (0, 5, 9, 4), replaced=[(0, 5, 9, 4)])], "version 6, WRITE"),
        ([undone(6, number=2)], "version 6, WRITE"),
    ],
    ids=["update", "delete", "another query replaced", "in the same epoch", "a later repair", "undo of another"],
)
def test_what_may_have_changed_its_rows_since_is_named(since, why):
    with pytest.raises(CantUndo, match=why):
        found_in([*REPAIRED, *since])
    with pytest.raises(CantUndo, match="UPDATE"):
        found_in([*REPAIRED[:4], other(3, "UPDATE"), *REPAIRED[4:]])


@pytest.mark.parametrize("kept_from", range(3, len(REPAIRED)))
def test_a_history_that_lacks_the_repair_s_beginning_is_refused(kept_from):
    """Also where its oldest commit is another batch's: the rest of the repair would be taken for all of it."""
    with pytest.raises(CantUndo, match="does not reach back"):
        found_in(REPAIRED[kept_from:])
    with pytest.raises(CantUndo, match="does not reach back"):
        found_in([batch(4, (0, 12, 14, NUMBER)), *REPAIRED[5:]])
    assert found_in(REPAIRED[2:]).before == 2


def test_an_undone_one_says_so_whatever_came_since():
    commits = [*REPAIRED, undone(6), other(7, "UPDATE")]
    assert found_in(commits).is_undone
    assert found_in(commits[4:]).is_undone


def test_without_a_replaced_row_there_is_none():
    assert found_in(BEGUN) is None
    assert found_in([*BEGUN, batch(3, (0, 5, 20, NUMBER))]) is None
    assert found_in([*BEGUN, again(3, 5, 20)._replace(text="{}")]) is None
