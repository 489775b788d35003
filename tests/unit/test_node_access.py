"""Access to a node: the pure rules, and the identity in a certificate."""

from pathlib import Path
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.errors import BadArgument, CorruptFile
from pushrep.replicate import access
from pushrep.replicate.access import (
    ANONYMOUS,
    LOCAL,
    Access,
    Kept,
    Place,
    Policy,
    Role,
    Rule,
    identity_in,
    parse_rule,
)
from pushrep.replicate.errors import Refusal
from pushrep.wire.calls import CALLS, ApiKey
from pushrep.wire.frames import FrameKind

ID, OTHER = UUID(int=7), UUID(int=8)
NEW = Place(ID, topics=frozenset({"orders"}))
ORDERS = Place(ID, "billing", frozenset({"orders"}), is_here=True)
FROM_BEFORE = Place(ID, None, frozenset({"orders"}), is_here=True)


def test_a3_every_call_has_its_roles():
    assert access.ROLES_OF.keys() == set(ApiKey)
    asked = {key for key, kinds in CALLS.items() if FrameKind.REQUEST in kinds}
    nobody = {key for key, roles in access.ROLES_OF.items() if not roles}
    assert nobody.isdisjoint(asked), "a call that nobody may make"
    assert {key for key, roles in access.ROLES_OF.items() if roles == access.ALL} == {ApiKey.API_VERSIONS}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("any", Rule("*", "*", access.ALL)),
        (str(ID), Rule("*", str(ID), access.ALL)),
        ("billing", Rule("billing", "*", frozenset({Role.CREATE}), is_bare=True)),
        ("ann=orders*:read,list", Rule("ann", "orders*", frozenset({Role.READ, Role.LIST}))),
        ("spiffe://x/a=b=*:keep", Rule("spiffe://x/a=b", "*", frozenset({Role.KEEP}))),
    ],
)
def test_a2_rules_are_read_as_they_are_written(text, rule):
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "*", "ann=orders", "ann=orders:", "ann=:read", "=orders:read", "ann=x:reed"])
def test_a2_a_rule_that_grants_nothing_clear_is_refused(text):
    with pytest.raises(BadArgument):
        parse_rule(text)


def test_a2_a_name_alone_creates_and_leads_and_lists_what_it_created():
    policy = Policy.of(["billing", "shipping"])
    assert policy.may("billing", ApiKey.GRANT, NEW)
    assert policy.is_first_leader("billing", ApiKey.GRANT, NEW)
    assert policy.roles("billing", ORDERS) == {Role.CREATE, Role.LEAD, Role.LIST}
    assert policy.roles("shipping", ORDERS) == {Role.CREATE}
    assert not any(policy.may("shipping", call, ORDERS) for call in ApiKey if call is not ApiKey.API_VERSIONS)
    assert not policy.may("billing", ApiKey.DELETE, ORDERS)


def test_a2_patterns_mean_the_outbox_s_id_or_its_topic_as_it_lies_here():
    policy = Policy.of(["ann=orders*:read", f"ops={ID}:keep"])
    assert policy.may("ann", ApiKey.START_REPLAY, ORDERS)
    assert policy.may("ops", ApiKey.DELETE, ORDERS)
    assert not policy.may("ann", ApiKey.START_REPLAY, Place(OTHER, "x", frozenset({"payments"}), is_here=True))
    assert not policy.may(
        "ann", ApiKey.START_REPLAY, Place(OTHER, "x", frozenset({"payments", "orders"}), is_here=True)
    )
    assert not policy.may("ops", ApiKey.DELETE, Place(OTHER, "x", frozenset({"orders"}), is_here=True))


def test_a2_an_owner_that_is_allowed_no_more_leads_no_more():
    assert not Policy.of(["shipping"]).may("billing", ApiKey.APPEND_RECORDS, ORDERS)


def test_a2_a_member_of_the_grant_leads_and_lists_as_long_as_the_grant_names_it(tmp_path):
    clock, named = Clock(), {"node-1", LOCAL, ANONYMOUS}

    def look(_):
        return Kept(tmp_path / "outbox", frozenset({"orders"}), frozenset(named))

    made = Access(lambda: ["billing"], look, REAL_FILESYSTEM, clock, named=lambda: frozenset(named))
    for call in ApiKey:
        may = bool(access.ROLES_OF[call] & {Role.LEAD, Role.LIST})
        assert (made.may("node-1", call, ID), made.could("node-1", call)) == (may, may), call
        for unproven in (LOCAL, ANONYMOUS, "node-2"):
            assert (made.may(unproven, call, ID), made.could(unproven, call)) == (False, False)
    named.add("node-2")
    made.forget(ID)
    assert made.could("node-2", ApiKey.GRANT)
    assert made.may("node-2", ApiKey.GRANT, ID)
    named -= {"node-1", "node-2"}
    made.forget(ID)
    assert not made.may("node-1", ApiKey.GRANT, ID)
    named.add("node-3")  # by another process
    clock.ms += 1000
    assert made.could("node-3", ApiKey.GRANT)


@pytest.mark.parametrize("owner", [None, LOCAL, ANONYMOUS])
def test_a2_an_outbox_without_an_owner_is_bound_to_the_first_allowed_name_that_leads_it(owner):
    place = Place(ID, owner, frozenset({"orders"}), is_here=True)
    policy = Policy.of(["billing", "any"])
    assert policy.is_first_leader("billing", ApiKey.DESCRIBE_LOG, place)
    assert not policy.is_first_leader("billing", ApiKey.FETCH_RECORDS, place)
    assert not policy.is_first_leader("stranger", ApiKey.DESCRIBE_LOG, place), "`any` makes nobody an owner"


def test_a2_who_leads_by_a_rule_of_its_own_owns_what_it_creates_and_another_creator_does_not_get_it(tmp_path):
    topics = set()
    made = Access(
        lambda: ["billing=*:create,lead", "other", "second=orders:lead"],
        lambda _: Kept(tmp_path / "outbox", frozenset(topics)), REAL_FILESYSTEM, SYSTEM_CLOCK,
    )  # fmt: skip
    with pytest.raises(Refusal):
        made.check("second", ApiKey.GRANT, ID, ["orders"], begins=True)
    assert not (tmp_path / "outbox").exists(), "lead does not create"
    made.check("second", ApiKey.DESCRIBE_LOG, ID, ["orders"])
    made.check("billing", ApiKey.DESCRIBE_LOG, ID, ["orders"])
    made.check("billing", ApiKey.DESCRIBE_LOG, ID, ["orders"], begins=True)
    assert access.read_owner(tmp_path / "outbox", REAL_FILESYSTEM) == "billing"
    topics.add("orders")
    made.forget(ID)
    made.check("second", ApiKey.GRANT, ID, ["orders"], begins=True)
    for call in (ApiKey.GRANT, ApiKey.DESCRIBE_LOG, ApiKey.APPEND_RECORDS):
        with pytest.raises(Refusal):
            made.check("other", call, ID, ["orders"], begins=True)
        assert not made.may("other", call, ID)


def test_a2_an_append_binds_an_outbox_without_an_owner_and_a_look_does_not(tmp_path):
    made = Access(
        lambda: ["billing", "other"], lambda _: Kept(tmp_path / "outbox", frozenset({"orders"})), REAL_FILESYSTEM,
        SYSTEM_CLOCK,
    )  # fmt: skip
    made.check("other", ApiKey.DESCRIBE_LOG, ID)
    assert made.may("billing", ApiKey.APPEND_RECORDS, ID, begins=True)
    assert access.read_owner(tmp_path / "outbox", REAL_FILESYSTEM) == "billing"
    with pytest.raises(Refusal):
        made.check("other", ApiKey.DESCRIBE_LOG, ID)
    assert made.may("billing", ApiKey.LIST_LOGS, ID)


def test_a2_everybody_may_create_and_then_owns(tmp_path):
    topics = {ID: set(), OTHER: set()}

    def look(outbox_id):
        return Kept(tmp_path / str(outbox_id), frozenset(topics[outbox_id]))

    made = Access(lambda: ["*=orders:create"], look, REAL_FILESYSTEM, SYSTEM_CLOCK)
    made.check("ann", ApiKey.DESCRIBE_LOG, ID, ["orders"], begins=True)
    topics[ID].add("orders")
    made.forget(ID)
    assert made.may("ann", ApiKey.APPEND_RECORDS, ID, begins=True)
    assert not made.may("bob", ApiKey.APPEND_RECORDS, ID, begins=True)
    with pytest.raises(Refusal):
        made.check("ann", ApiKey.DESCRIBE_LOG, OTHER, ["payments"], begins=True)


@pytest.mark.parametrize(
    ("certificate", "identity"),
    [
        (
            {"subject": ((("commonName", "cn"),),), "subjectAltName": (("DNS", "d"), ("URI", "spiffe://x"))},
            "spiffe://x",
        ),
        ({"subject": ((("commonName", "cn"),),), "subjectAltName": (("IP Address", "::1"), ("DNS", "d"))}, "d"),
        ({"subject": ((("organizationName", "o"),), (("commonName", "cn"),)), "subjectAltName": ()}, "cn"),
        ({"subject": ((("organizationName", "o"),),)}, ANONYMOUS),
        ({"subject": ((("commonName", "local"),),)}, ANONYMOUS),
        ({"subject": ((("commonName", "*"),),)}, ANONYMOUS),
        ({}, ANONYMOUS),
    ],
)
def test_a1_the_identity_is_the_certificate_s_first_uri_or_dns_name_else_its_common_name(certificate, identity):
    assert identity_in(certificate) == identity


class Clock:
    """A clock that the test moves."""

    ms = 0

    def monotonic_ms(self):
        return self.ms


def test_a4_refusals_are_counted_by_call_and_identity_and_logged_once_a_minute(tmp_path, caplog):
    clock = Clock()
    made = Access(lambda: ["billing"], lambda _: Kept(tmp_path, frozenset()), REAL_FILESYSTEM, clock)
    for _ in range(50):
        made.refused("stranger", ApiKey.GRANT, ID)
    made.refused("stranger", ApiKey.LIST_LOGS)
    assert made.refusals() == {("GRANT", "stranger"): 50, ("LIST_LOGS", "stranger"): 1}
    assert caplog.text.count("UNAUTHORISED") == 2
    clock.ms += 60_000
    made.refused("stranger", ApiKey.GRANT, ID)
    assert "UNAUTHORISED (50 since the last such line)" in caplog.text


def test_a4_refusals_of_ever_new_names_take_no_more_memory(tmp_path):
    made = Access(lambda: ["billing"], lambda _: Kept(tmp_path, frozenset()), REAL_FILESYSTEM, Clock())
    for number in range(1100):
        made.refused(f"stranger {number}", ApiKey.GRANT, ID)
    assert len(made.refusals()) == 1001
    assert made.refusals()["GRANT", "others"] == 100


def test_a4_a_node_that_allows_nobody_says_so(tmp_path, caplog):
    Access(list, lambda _: Kept(tmp_path, frozenset()), REAL_FILESYSTEM, SYSTEM_CLOCK)
    assert "nobody may use this node" in caplog.text


def test_owner_json_is_written_as_the_docs_show_it_and_a_changed_bit_is_noticed(tmp_path):
    access.write_owner(tmp_path, "billing", REAL_FILESYSTEM)
    written = (tmp_path / "owner.json").read_text()
    page = Path(__file__).parents[2] / "docs/internals/formats/node-files.md"
    assert written in page.read_text(encoding="utf-8")
    assert access.read_owner(tmp_path, REAL_FILESYSTEM) == "billing"
    (tmp_path / "owner.json").write_text(written.replace("billing", "billinh"))
    with pytest.raises(CorruptFile):
        access.read_owner(tmp_path, REAL_FILESYSTEM)
