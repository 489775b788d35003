"""The wire has a place, by the same name, for all that the rules of replication say to another member."""

from dataclasses import fields

import pytest

from pushrep.election.candidate import MemberAnswer
from pushrep.election.epochs import EpochEnd as RulesEpochEnd
from pushrep.wire.push_messages import (
    DescribeLogResponse,
    GrantResponse,
    LogDescription,
    WireEpochEnd,
)


def names(struct):
    return set(struct._fields) if hasattr(struct, "_fields") else {field.name for field in fields(struct) if field.init}


@pytest.mark.parametrize(
    ("rules", "wire", "otherwise"),
    [
        (RulesEpochEnd, WireEpochEnd, {}),
        # Whose it is stands in its certificate, not in what it says.
        (
            MemberAnswer,
            DescribeLogResponse,
            {
                "index": "member",
                "grant": "grants",
                "identity": "member",
            },
        ),
        # How long ago the leader was heard is asked before a number is taken, never with a grant.
        (
            MemberAnswer,
            GrantResponse,
            {
                "index": "member",
                "grant": "grants",
                "contact_age_ms": "member",
                "identity": "member",
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_field_of_the_rules_has_its_place(rules, wire, otherwise):
    assert {otherwise.get(name, name) for name in names(rules)} <= names(wire)


def test_a_log_is_described_with_all_that_candidates_compare():
    compared = {"log_start_offset", "log_end_offset", "leader_epochs", "high_watermark", "granted_epoch"}
    assert compared | {"granted_end_offset", "ungranted_from", "damaged_from"} <= names(LogDescription)
