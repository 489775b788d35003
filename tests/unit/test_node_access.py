"""Access to a node: the pure rules, and the identity in a certificate."""

from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.env.checked_json import write_checked_json
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
from pushrep.replicate.election_state import NODE_FILE_VERSION
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


@pytest.fixture
def beside(tmp_path):
    """A node with the outboxes of `topics`, by id; its clock stands."""
    topics, clock = {}, Clock()

    def make(*rules):
        return Access(
            lambda: rules, lambda outbox_id: Kept(tmp_path / str(outbox_id), frozenset(topics.get(outbox_id, ()))),
            REAL_FILESYSTEM, clock, listed=lambda: list(topics),
        )  # fmt: skip

    return SimpleNamespace(make=make, topics=topics, clock=clock)


def begins(made, identity, outbox_id, *topics):
    """Whether it may create an outbox of these topics; it is its owner then."""
    try:
        made.check(identity, ApiKey.DESCRIBE_LOG, outbox_id, topics, begins=True)
    except Refusal:
        return False
    return made.owner_of(outbox_id) == identity


def test_a_topic_here_is_its_first_creators_until_a_rule_with_a_pattern_lets_another_in(beside):
    made = beside.make("billing", "shipping", "ann=ord*:create", "bob=pay*:create")
    assert begins(made, "billing", ID, "orders")
    beside.topics[ID] = {"orders"}
    made.forget(ID)
    for identity in ("shipping", "bob"):
        assert not begins(made, identity, OTHER, "orders")
        assert not begins(made, identity, OTHER, "orders", "mine")
        assert made.owner_of(OTHER) == ""
    assert made.refusals() == {("DESCRIBE_LOG", "shipping"): 2, ("DESCRIBE_LOG", "bob"): 2}
    made.check("shipping", ApiKey.DESCRIBE_LOG, OTHER, ["orders"])  # a look creates nothing
    assert begins(made, "shipping", OTHER, "payments")
    assert begins(made, "ann", UUID(int=9), "orders"), "a rule with a pattern"
    beside.topics |= {OTHER: {"payments"}, UUID(int=9): {"orders"}}
    assert begins(made, "billing", UUID(int=10), "orders"), "its own, beside another's"
    assert begins(made, "bob", UUID(int=11), "payments")


def test_a_topic_that_is_being_made_is_kept_for_its_creator_for_a_minute(beside):
    made = beside.make("billing", "shipping", "*=other*:create")
    assert not begins(made, "stranger", OTHER, "orders"), "who may not create keeps nothing from others"
    assert begins(made, "billing", ID, "orders")
    assert not begins(made, "shipping", OTHER, "orders")
    beside.clock.ms += 59_999
    assert not begins(made, "shipping", OTHER, "orders")
    assert begins(made, "billing", UUID(int=9), "orders"), "it made one of its own meanwhile"
    beside.clock.ms += 60_000
    assert begins(made, "shipping", OTHER, "orders")


def test_what_lay_here_before_is_led_on_by_each_of_its_owners(beside, tmp_path):
    made = beside.make("billing", "shipping")
    for outbox_id, owner in ((ID, "billing"), (OTHER, "shipping")):
        beside.topics[outbox_id] = {"orders"}
        (tmp_path / str(outbox_id)).mkdir()
        access.write_owner(tmp_path / str(outbox_id), owner, REAL_FILESYSTEM)
    assert begins(made, "shipping", OTHER, "orders")
    assert begins(made, "billing", ID, "orders")
    assert not begins(made, "billing", OTHER, "orders")


def test_about_all_outboxes_only_a_rule_for_all_of_them_decides(beside):
    made = beside.make("ann=*:list", "bob=orders:list", "billing")
    allowed = {one: made.may(one, ApiKey.DESCRIBE_NODE, None) for one in ("ann", "bob", "billing", "stranger")}
    assert allowed == {"ann": True, "bob": False, "billing": False, "stranger": False}
    assert [made.has_role(one) for one in ("ann", "bob", "billing", "stranger")] == [True, True, True, False]
    assert not made.may("ann", ApiKey.DELETE, None)


def test_rules_of_a_file_are_its_lines_without_comments(tmp_path):
    (tmp_path / "allow").write_text("# who\n\n  billing  \n  # nobody\nann=*:list\n")
    assert access.read_rules(tmp_path / "allow") == ["billing", "ann=*:list"]
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("absent", "bytes"):
        with pytest.raises(BadArgument, match=rf"{name} can't be read") as refused:
            access.read_rules(tmp_path / name)
        assert refused.value.argument == "allow_file"


@pytest.mark.parametrize("owner", [7, "", None])
def test_an_owner_that_is_no_name_is_damage(tmp_path, owner):
    write_checked_json(REAL_FILESYSTEM, tmp_path / "owner.json", {"owner": owner}, NODE_FILE_VERSION)
    with pytest.raises(CorruptFile, match="its owner is"):
        access.read_owner(tmp_path, REAL_FILESYSTEM)


def test_owner_json_is_written_as_the_docs_show_it_and_a_changed_bit_is_noticed(tmp_path):
    access.write_owner(tmp_path, "billing", REAL_FILESYSTEM)
    written = (tmp_path / "owner.json").read_text()
    page = Path(__file__).parents[2] / "docs/internals/formats/node-files.md"
    assert written in page.read_text(encoding="utf-8")
    assert access.read_owner(tmp_path, REAL_FILESYSTEM) == "billing"
    (tmp_path / "owner.json").write_text(written.replace("billing", "billinh"))
    with pytest.raises(CorruptFile):
        access.read_owner(tmp_path, REAL_FILESYSTEM)
