"""Names of logs, and the list of a directory."""

import pytest

from pushrep.log.directory_files import list_logs, log_name, parse_log_name
from pushrep.log.errors import InvalidLogName, NotALog


@pytest.mark.parametrize(
    ("topic", "partition"), [("orders", 0), ("a-1", 12), ("A.b_c-d", 2**31 - 1), ("x" * 249, 3), ("-", 0)]
)
def test_name_and_parts_say_the_same(topic, partition):
    assert parse_log_name(log_name(topic, partition)) == (topic, partition)


@pytest.mark.parametrize(
    ("topic", "partition"),
    [
        ("", 0),
        (".", 0),
        ("..", 0),
        ("x" * 250, 0),
        ("a b", 0),
        ("ä", 0),
        ("a/b", 0),
        ("a\n", 0),
        ("a", -1),
        ("a", 2**31),
    ],
)
def test_bad_parts_are_refused(topic, partition):
    with pytest.raises(InvalidLogName, match="is no name of a log"):
        log_name(topic, partition)


@pytest.mark.parametrize(
    "name", ["orders", "orders-", "-0", "orders-00", "orders-1 ", "orders-+1", "orders-٣", "orders-0\n", "..-1", "#a-0"]
)
def test_bad_names_are_refused(name):
    with pytest.raises(InvalidLogName):
        parse_log_name(name)


def test_the_list_is_sorted_by_number_and_leaves_other_files_out(tmp_path):
    for name in ("orders-10", "orders-9", "a-b-0", "orders-0.8f14e45f-delete", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / ".lock").touch()
    assert list_logs(tmp_path) == [("a-b", 0), ("orders", 9), ("orders", 10)]


def test_no_directory_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(NotALog) as refused:
            list_logs(path)
        assert refused.value.path == path
