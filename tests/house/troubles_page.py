"""docs/troubles.md, made from the code: python -m tests.house.troubles_page > docs/troubles.md"""

import ast
import sys
from collections.abc import Iterator

from pushrep.status import PROBLEMS
from tests.house.figures import error_classes, nodes, sources
from tests.house.statements_page import ROOT, held_by


class Fault:
    """A row of the table of faults. tests: each `file: names`, as in statements.toml."""

    def __init__(self, fault: str, stops: str, goes_on: str, ends: str, *tests: str) -> None:
        self.name, self.cells, self.tests = fault, (fault, stops, goes_on, ends), ["", "", *tests]


FAULTS = (
    Fault(
        "a sync fails, or a write to a log that can't be undone",
        "appends to that partition",
        "the other partitions; reading, shipping and pushing of all",
        "the log is opened again by itself, within a second and then at least every minute",
        "test_outbox_failures: test_a_failed_fdatasync_stops_the_partition_until_its_log_is_open_again "
        "test_a_disk_that_stays_broken_is_tried_again_at_least_every_minute",
    ),
    Fault(
        "no room, a quota, too few descriptors",
        "that append",
        "the next append, and everything else",
        "the next append that the system takes",
        "test_health: test_a_log_that_refuses_an_append_is_a_problem_until_it_takes_one",
        "test_log_shortages: test_a_moment_without_descriptors_stops_no_partition",
    ),
    Fault(
        "another program removes, renames, replaces or cuts a log's newest file",
        "appends to that partition; nothing is acknowledged into the other file",
        "the other partitions",
        "the log is opened again by itself, and what is still open is written back; what was cut is damage",
        "test_log_still_mine: test_faults_f2_no_append_is_acknowledged_into_a_file_that_is_another "
        "test_faults_f2_what_is_still_open_is_written_back_and_the_log_goes_on "
        "test_faults_f2_what_was_cut_is_said_to_be_gone",
        "test_still_mine: "
        "test_faults_f2_a_leader_whose_newest_file_is_another_leads_on_with_what_members_hold "
        "test_faults_f2_a_member_whose_newest_file_is_another_acknowledges_nothing_until_it_has_all_again",
    ),
    Fault(
        "the directory is moved, and another one made at its path",
        "nothing; it is a problem",
        "everything, in the moved directory; the other one is not touched",
        "the process's end, or the directory's return",
        "test_log_still_mine: "
        "test_faults_f1_a_moved_directory_keeps_its_own_files_and_the_new_one_is_not_touched "
        "test_faults_f1_an_outbox_goes_on_in_its_moved_directory_and_says_so",
    ),
    Fault(
        "the disk hangs",
        "receipts of that disk's partitions",
        "appends, until `buffer_bytes` are waiting",
        "the disk's answer",
        "test_health: test_records_that_wait_for_a_disk_that_hangs_are_a_problem",
    ),
    Fault(
        "a log lost records that were on disk",
        "appends to that partition, and reading from there on",
        "the other partitions",
        "`pushrep log repair`, with another member's copy",
        "test_cli_status: test_damage_that_an_opening_met_is_a_problem_with_its_time_and_its_log",
    ),
    Fault(
        "the wall clock is set by more than a minute, or is beyond all records at an opening",
        "removal of old records by time",
        "appends and reading; removal by size, by a filling disk, by `pushrep log purge`",
        "`retention_ms`, or a day if that is longer, without a further step",
        "test_log_keeping: test_faults_f3_a_clock_that_was_set_removes_nothing_for_a_day "
        "test_faults_f3_an_opening_beyond_all_records_removes_nothing_for_a_day_and_says_so",
    ),
    Fault(
        "a log is cut below what a reader was given, and grows again",
        "that reader: `ReplayTruncated`, of `records()` `OffsetOutOfRange`",
        "readers below the cut",
        "its next start",
        "test_replay_windows: test_faults_f5_a_log_that_is_cut_and_grown_again_between_two_looks_ends_its_replay "
        "test_faults_f5_a_log_that_was_cut_while_it_was_closed_ends_its_replay",
        "test_log_reading: test_faults_f5_records_of_two_histories_never_follow_each_other",
        "test_still_mine: test_faults_f5_a_reader_of_a_node_is_told_from_where_on_what_it_got_is_void",
    ),
    Fault(
        "fewer than `min_insync_replicas` members are in sync",
        "appends with `Acks.ALL`; `/readyz` is 503 after five seconds",
        "shipping of what is acknowledged, reading",
        "enough members, without a restart",
        "test_health: test_an_outbox_without_its_members_is_not_ready_and_ready_once_it_leads",
    ),
    Fault(
        "a node's log fails",
        "pushing to that copy",
        "the node's other logs; the leader and its other members",
        "the leader's next session",
        "test_replica_node: test_a_disk_error_takes_one_log_offline_and_it_comes_back",
    ),
    Fault(
        "Kafka is away",
        "shipping",
        "appends; `/readyz` stays 200",
        "a broker that answers",
        "test_health: test_a_kafka_away_for_longer_than_the_limit_is_a_problem_and_ready",
    ),
    Fault(
        "a partition of the topic has no leader, or Kafka dropped its marker",
        "shipping to that partition",
        "the topic's other partitions, also at an opening",
        "a leader; without a marker for ten seconds, a transaction of its own",
        "test_leaderless: test_the_others_are_shipped_at_an_opening_as_while_running "
        "test_a_marker_that_never_comes_is_asked_for_again",
    ),
    Fault(
        "a record that the topic refuses, or would delete on arrival",
        "shipping of its partition, from that record on",
        "the other partitions; what is before it in its batch; every opening",
        "the topic's setting, or `pushrep outbox skip`; nothing stops with `on_refused='park'`",
        "test_refused_records: test_one_record_stops_one_partition_at_its_own_offset "
        "test_a_parked_record_lets_its_partition_go_on",
    ),
    Fault(
        "the topic lacks a record and holds later ones, as who ships now does not know that it was given up",
        "shipping of its partition, from that record on",
        "the other partitions; appends; every opening",
        "`pushrep outbox skip` again, or `pushrep outbox rebase`",
        "test_refused_records: test_a_record_that_is_missing_before_later_ones_stops_its_partition",
    ),
    Fault(
        "brokers of another cluster answer at a known address",
        "shipping, if only such answer; nothing is sent to them",
        "appends; `wait_shipped` raises `AnotherCluster`",
        "a broker of the topic's cluster",
        "test_another_cluster: test_another_cluster_at_the_same_address_gets_nothing",
    ),
    Fault(
        "a broker hangs",
        "shipping to the partitions that it leads",
        "the other partitions; `lag()` names it after five seconds",
        "its answer, or another leader",
        "test_leaderless: test_a_broker_that_hangs_keeps_no_partition_of_another_one_waiting",
    ),
    Fault(
        "a worker of many dies, and none takes its slot",
        "nothing for longer than some seconds; without another worker that ships, shipping of its slot",
        "the other workers",
        "another worker, which ships the rest and gives the slot up to whoever opens it",
        "test_shipping_slots: "
        "test_faults_b8_fewer_workers_ship_what_the_others_left_and_give_a_slot_up_to_whoever_opens_it",
    ),
    Fault(
        "a reader looks for metadata in the key, and they are in the header",
        "that reader, once it has seen a hundred such records and none else; before, a warning",
        "readers of which a record had metadata: all others pass and are counted",
        "the right `carrier`",
        "test_carrier: test_faults_s7_the_first_hundred_records_that_carry_it_in_the_header_stop_a_reader_of_keys "
        "test_faults_s7_anything_else_stops_nobody_and_is_said_once_with_topic_and_carrier",
    ),
    Fault(
        "a row commits behind a later one",
        "that append: it is refused",
        "the records behind it",
        "another numbering of rows",
        "test_commit_order: test_faults_s6_by_id_the_outbox_refuses_it_and_says_what_to_do",
    ),
)
HEAD = """\
# Troubles

Made from the code by `python -m tests.house.troubles_page`; a test compares the two. Search it for the
name of a problem, or of an error, or for words of its message.

## Problems

What `pushrep status`, `/readyz`, the metric `pushrep_problem`, the [alerts](alerts.md) and the [console](console.md)
show, worst first. DIRECTORY is the place that shows it.

| problem | blocks | what it is | what to do | next command |
|---|---|---|---|---|
"""
ERRORS = """
## Errors

Each is named for what the caller does next, and has the facts as fields; a message has them for what stands in braces.

| error | what it is, and what to do | its message |
|---|---|---|
"""
STOPS = """
## What stops, what goes on, what ends it

| fault | stops | goes on | ends with | test |
|---|---|---|---|---|
"""


_TABLES = dict.fromkeys(("table_stopped", "table_waits", "rows_parked", "vacuum_held"), "TOPIC")
_ARGUMENTS = {**_TABLES, "replay_stalled": "SESSION", "shipping_stopped": "OFFSET --partition N --topic TOPIC"}


def page() -> str:
    """The whole page."""
    problems = (
        f"| `{name}` | {kind.blocks.value} | {kind.means} | {kind.advice} "
        f"| `{kind.command.format(at='DIRECTORY', argument=_ARGUMENTS.get(name, ''))}` |\n"
        for name, kind in PROBLEMS.items()
    )
    errors = (f"| `{name}` | {text} | {message} |\n" for name, text, message in sorted(errors_told()))
    faults = (f"| {' | '.join(one.cells)} | {_named(one.tests)} |\n" for one in FAULTS)
    return "".join([HEAD, *problems, STOPS, *faults, ERRORS, *errors])


def errors_told() -> Iterator[tuple[str, str, str]]:
    """Name, first paragraph and message of each public error class; who raises it may make the message."""
    where = error_classes()
    for module, path in sources().items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and module in where.get(node.name, ()) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").split("\n\n")[0]
                yield node.name, _cell(text), _cell(_message(node))


def text_of(node: ast.AST) -> str | None:
    """A string of the code, with what is filled in in braces; None for another node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(one) or "" for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value).split('.')[-1]}}}" if isinstance(node.value, _NAMED) else "{...}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


_NAMED = ast.Name | ast.Attribute


def _message(error: ast.ClassDef) -> str:
    for node in ast.walk(error):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and node.args:
            return text_of(node.args[0]) or ""
    return ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _named(tests: list[str]) -> str:
    return " ".join(f"`{path.relative_to(ROOT)}::{name}`" for path, name in held_by(tests))


if __name__ == "__main__":
    sys.stdout.write(page())
