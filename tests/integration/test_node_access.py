"""Access to a node under mutual TLS: every call by every kind of identity, strangers, rotation of certificates."""

import random
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushrep import Outbox
from pushrep.cli.status import look_at
from pushrep.election.grants import Member
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.outbox import NotEnoughReplicas
from pushrep.outbox.promotion import promote
from pushrep.replay import FOLLOW, NodeAccess, ReplayClient, ReplayRequest
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.certificates import CertificateFiles, Reloading, expires_s, mutual_tls
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.member_clients import tp_of
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replay_calls import REPLAY_CALLS
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address, send_all
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as push
from pushrep.wire import replay_messages as replay
from pushrep.wire.calls import CALLS, PLACE_OF, ApiKey, encode
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind
from tests.integration.certificates import trial_certificates
from tests.integration.conftest import WAIT_S
from tests.integration.outboxes import wait_until
from tests.programs import PythonProgram
from tests.properties.test_wire import messages_of
from tests.support.outbox_arguments import outbox_arguments

NAMES = ("owner", "second", "reader", "keeper", "lister", "other", "stranger")
ALLOW = frozenset(
    {"owner", "other=*:create", "second=orders*:lead", "reader=orders:read", "keeper=orders:keep", "lister=*:list"}
)
FOREIGN = UUID(int=99)
LEADERS = {"owner", "second"}
MAY = {
    ApiKey.DESCRIBE_LOG: LEADERS,
    ApiKey.APPEND_RECORDS: LEADERS,
    ApiKey.END_OFFSET_FOR_EPOCH: LEADERS,
    ApiKey.GRANT: LEADERS,
    ApiKey.FETCH_RECORDS: LEADERS | {"reader"},
    ApiKey.LIST_LOGS: {"owner", "lister"},
    ApiKey.BEAT: LEADERS,
    ApiKey.DESCRIBE_DAMAGE: LEADERS,
    ApiKey.REPAIR_RECORDS: LEADERS,
    ApiKey.DESCRIBE_NODE: {"lister"},
    ApiKey.START_REPLAY: LEADERS | {"reader"},
    ApiKey.DESCRIBE_RECORDINGS: LEADERS | {"reader", "keeper", "lister"},
    ApiKey.EXTEND: {"keeper"},
    ApiKey.TRUNCATE: {"keeper"},
    ApiKey.PURGE: {"keeper"},
    ApiKey.DELETE: {"keeper"},
    ApiKey.STOP_REPLAY: {"keeper"},  # all sessions of a recording
}
"""Who of NAMES may make a call about the owner's outbox, written down beside the product's own table."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    trial_certificates(directory, ("127.0.0.1", *NAMES))
    return directory


def server_files(directory):
    return CertificateFiles(directory / "127.0.0.1.pem", directory / "127.0.0.1.key", directory / "ca.pem")


def shown(directory, name):
    context = mutual_tls(cert=directory / f"{name}.pem", key=directory / f"{name}.key", ca=directory / "ca.pem")
    return PushSettings(tls=context, connect_timeout_ms=60_000, backoff_min_ms=1, backoff_max_ms=50)


@pytest.fixture
def led(world, tls):
    """A node on which `owner` has led an outbox: (replica, service)."""
    member = world.node(1, certificates=server_files(tls), allow=ALLOW)
    service = world.service([member], settings=shown(tls, "owner")).start()
    for number in range(20):
        service.append(b"record %d" % number)
    assert service.wait() is None
    service.close()
    return member, service


def requests(grant, outbox_id, recording_id, tp):
    """One of every call, about this outbox."""
    part = push.AppendRecordsPartition(
        tp=tp, leader_epoch=256, replica_epoch=1, session_id=1, append_offset=0, previous_epoch=-1,
        epoch_start_offset=0, high_watermark=0, log_start_offset=0, end_session_reason=-1,
    )  # fmt: skip
    question = push.EpochQuestion(tp=tp, leader_epoch=256, epoch=256)
    return [
        push.DescribeLogRequest(outbox_id=outbox_id, member=0, create=False, partitions=(tp,)),
        push.DescribeLogRequest(outbox_id=outbox_id, member=0, create=True, partitions=(tp,)),
        push.AppendRecordsRequest(partitions=(part,)),
        push.EndOffsetForEpochRequest(partitions=(question,)),
        push.GrantRequest(grant=grant, sender=grant.leader, member=1, partitions=(tp,)),
        push.FetchRecordsRequest(tp=tp, grant_epoch=1 << 20, offset=0, max_bytes=1 << 20),
        push.ListLogsRequest(outbox_id=outbox_id),
        push.BeatRequest(outbox_id=outbox_id, leader=grant.leader, leader_epoch=grant.epoch),
        push.DescribeDamageRequest(outbox_id=outbox_id),
        push.RepairRecordsRequest(outbox_id=outbox_id, tp=tp, grant_epoch=1 << 20, base_offset=0),
        push.DescribeNodeRequest(),
        replay.StartReplayRequest(
            recording_id=recording_id, position_kind=replay.PositionKind.LOG_START, position=0,
            length_kind=replay.LengthKind.TO_END, length=0,
        ),
        replay.DescribeRecordingsRequest(),
        replay.ExtendRequest(recording_id=recording_id, leader_epoch=1),
        replay.TruncateRequest(recording_id=recording_id, offset=1 << 30),
        replay.PurgeRequest(recording_id=recording_id, before_offset=0),
        replay.StopReplayRequest(recording_id=recording_id),
        replay.DeleteRequest(recording_id=recording_id),
    ]  # fmt: skip


def tp_in(world):
    """The log that the node keeps."""
    [(_, kept)] = world.nodes[1].replicas()
    return kept.tp


def key_of(request):
    return PLACE_OF[type(request)][0]


def ask(address, settings, request):
    with ReplicaClient(address, settings) as client:
        return client.ask(request, CALLS[key_of(request)][FrameKind.RESPONSE])


def codes(answer):
    parts = [*getattr(answer, "results", ()), *getattr(answer, "logs", ())]
    return {answer.error_code, *(part.error_code for part in parts)}


def tree(directory):
    """Directories, and every file that calls write; a log's own thread writes indexes and checkpoints at its time."""
    return {
        str(path): sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for path in sorted(Path(directory).rglob("*"))
        if path.is_dir() or path.suffix in {".log", ".json", ".metadata", ".cut"} or path.name == ".pushrep_recordings"
    }


def test_a3_every_call_by_every_identity(world, tls, led):
    member, service = led
    told = requests(service.grant, world.outbox_id, 1, tp_in(world))
    no_outbox = {ApiKey.API_VERSIONS, ApiKey.ATTACH}  # versions are everybody's; sessions are below
    assert {key_of(one) for one in told} | no_outbox == {
        key for key, kinds in CALLS.items() if FrameKind.REQUEST in kinds
    }
    found = {
        (key_of(request), name): ErrorCode.UNAUTHORISED not in codes(ask(member.address, shown(tls, name), request))
        for request in told[:-1]
        for name in NAMES
    }
    assert found == {(key, name): name in MAY[key] for key, name in found}
    for name in NAMES:  # at last, since it is carried out
        may = ErrorCode.UNAUTHORISED not in codes(ask(member.address, shown(tls, name), told[-1]))
        assert may == (name in MAY[ApiKey.DELETE])
    with pytest.raises(NodeUnreachable):
        ask(member.address, PushSettings(connect_timeout_ms=5000), told[0])


def test_a3_who_may_list_one_outbox_is_shown_its_logs_and_nothing_of_the_node(world, tls, led):
    member, _ = led
    owners, all_of_it = (look_at(str(member.address), shown(tls, name).tls)[0] for name in ("owner", "lister"))
    assert [log["topic"] for log in owners["logs"]] == [log["topic"] for log in all_of_it["logs"]] == ["orders"]
    assert all_of_it["replays"]["sessions"] == all_of_it["standbys"] == []
    kept = {"place", "kind", "state", "address", "certificates", "logs", "problems", "why"}
    assert {name for name, value in owners.items() if value or name == "problems"} == kept


def test_a3_a_session_is_its_beginner_s(world, tls, led, caplog):
    member, service = led
    start = only(replay.StartReplayRequest, requests(service.grant, world.outbox_id, 1, tp_in(world)))
    world.replica(1).log.flush()
    session = ask(member.address, shown(tls, "reader"), start).session_id
    attach = replay.AttachRequest(session_id=session, credit_bytes=1 << 20)
    assert ask(member.address, shown(tls, "owner"), attach).error_code is ErrorCode.UNKNOWN_REPLAY
    stop = replay.StopReplayRequest(session_id=session)
    assert ask(member.address, shown(tls, "owner"), stop).stopped == 0
    assert ask(member.address, shown(tls, "reader"), attach).error_code is ErrorCode.NONE
    caplog.set_level("INFO", "pushrep.node.audit")
    session = ask(member.address, shown(tls, "reader"), start).session_id
    assert ask(member.address, shown(tls, "keeper"), replay.StopReplayRequest(session_id=session)).stopped == 1
    assert f"audit: 'keeper' calls STOP_REPLAY: session_id='{session}'" in caplog.text


def test_a3_who_may_not_changes_no_byte_and_learns_nothing(world, tls, led):
    """A caller without rights, and one that may create outboxes, get the same answers about the outbox as about none.

    The order of calls is random, by seed.
    """
    member, service = led
    node, chosen = world.nodes[1], random.Random(7)
    world.replica(1).log.flush()
    ask(member.address, shown(tls, "lister"), replay.DescribeRecordingsRequest())  # gives the log its number
    before = tree(node.directory)
    nowhere = TopicIdPartition(FOREIGN, "orders", 0)
    for name in ("stranger", "other"):
        here = requests(service.grant, world.outbox_id, 1, tp_in(world))
        absent = requests(replace(service.grant, outbox_id=FOREIGN), FOREIGN, 77, nowhere)
        pairs = [
            (mine, other)
            for mine, other in zip(here, absent, strict=True)
            # What begins an outbox is what `other` is allowed, and it names 128 random bits.
            if name == "stranger" or key_of(mine) not in {ApiKey.DESCRIBE_LOG, ApiKey.GRANT, *_BY_TOPIC_ID}
        ]
        for mine, other in chosen.sample(pairs, len(pairs)) + chosen.sample(pairs, len(pairs)):
            about_it, about_none = (ask(member.address, shown(tls, name), one) for one in (mine, other))
            assert ErrorCode.UNAUTHORISED in codes(about_it) or not codes(about_it) - {ErrorCode.NONE}
            named = (str(world.outbox_id), str(FOREIGN), "recording 1 ", "recording 77 ")
            assert plain(about_it, *named) == plain(about_none, *named), type(mine)
    assert tree(node.directory) == before
    assert sum(node.access.refusals().values()) > 40
    look = requests(service.grant, world.outbox_id, 1, tp_in(world))[0]
    assert ask(member.address, shown(tls, "owner"), look).logs[0].log_end_offset == 20


REQUESTS = st.one_of([messages_of(kinds[FrameKind.REQUEST]) for kinds in CALLS.values() if FrameKind.REQUEST in kinds])
CREDITS = messages_of(replay.Credit)


def about(value, known, chosen):
    """The same message, often with ids of existing outboxes and logs."""
    if isinstance(value, TopicIdPartition | UUID):
        return chosen.choice([value, known[type(value)]])
    if isinstance(value, tuple):
        return tuple(about(one, known, chosen) for one in value)
    if not is_dataclass(value):
        return value
    if isinstance(value, Member):  # two of them in one directory make no grant
        return value
    parts = {one.name: about(getattr(value, one.name), known, chosen) for one in fields(value) if one.init}
    named = [name for name in parts if name in known and chosen.random() < 0.7]
    return type(value)(**parts | {name: known[name] for name in named})


class Caller:
    """A caller with an identity, and a connection for pushes and one for replays, as a node requires."""

    def __init__(self, address, settings):
        self.address, self.settings, self.clients = address, settings, {}

    def client(self, request):
        place = isinstance(request, replay.Credit) or key_of(request) in REPLAY_CALLS
        if place not in self.clients:
            self.clients[place] = ReplicaClient(self.address, self.settings)
        return self.clients[place]

    def ask(self, request):
        """The answer's text; that it hung up. Whoever has no role is disconnected behind a refusal."""
        try:
            told = str(self.client(request).ask(request, CALLS[key_of(request)][FrameKind.RESPONSE]))
        except NodeUnreachable as error:
            self.close()
            return str(error).replace(str(self.address), "")
        if "UNAUTHORISED" in told:
            self.close()
        return told

    def credit(self, event):
        """Send credit for another caller's session, which our client never does."""
        with suppress(OSError):
            send_all(self.client(event).socket, encode(event, 1))

    def close(self):
        for client in self.clients.values():
            client.close()
        self.clients.clear()


def test_a3_a_strangers_random_calls_change_no_byte_and_reveal_none(world, tls, led, torture):
    """All its calls to a node with an outbox, with ids that it should not know, and with a replay of that outbox, are
    answered as by an empty node. A caller that may create outboxes changes no byte of another one's outbox either.
    """
    member, _ = led
    node, empty = world.nodes[1], world.node(2, certificates=server_files(tls), allow=ALLOW)
    tp, home = tp_in(world), node.directory / str(world.outbox_id)
    world.replica(1).log.flush()
    reading = ReplayClient(str(member.address), node=NodeAccess(tls=shown(tls, "reader").tls))
    callers = {
        name: [Caller(one.address, shown(tls, name)) for one in (member, empty)] for name in ("stranger", "other")
    }
    with reading, reading.replay(ReplayRequest(recording="orders-0", length=FOLLOW, bound="written")) as followed:
        assert [record.offset for record in islice(followed, 20)] == list(range(20))
        (session,) = node.replay_server.counters().sessions
        known = {TopicIdPartition: tp, UUID: world.outbox_id, "session_id": session.session_id, "recording_id": 1}
        before = tree(home)
        credits_before = node.replay_server.counters().sessions[0].credit

        @settings(max_examples=torture.count(60, 5_000), deadline=None)
        @given(REQUESTS, CREDITS, st.randoms(use_true_random=False), st.sampled_from(["stranger", "other"]))
        def changes_nothing(request, credit, chosen, name):
            here, there = callers[name]
            asked, is_there = about(request, known, chosen), tree(node.directory)
            answer = here.ask(asked)
            if name == "stranger":
                assert answer == there.ask(asked)
                assert key_of(asked) is ApiKey.API_VERSIONS or "UNAUTHORISED" in answer
                assert tree(node.directory) == is_there
            here.credit(about(credit, known, chosen))
            assert tree(home) == before

        changes_nothing()
        (after,) = node.replay_server.counters().sessions
        assert (after.session_id, after.state) == (session.session_id, session.state)
        assert after.credit <= credits_before
    for caller in [one for pair in callers.values() for one in pair]:
        caller.close()
    assert {call for call, who in node.access.refusals() if who == "stranger"} >= {
        key.name for key, kinds in CALLS.items() if FrameKind.REQUEST in kinds
    } - {"API_VERSIONS"} or not torture.is_long


_BY_TOPIC_ID = {ApiKey.APPEND_RECORDS, ApiKey.END_OFFSET_FOR_EPOCH, ApiKey.FETCH_RECORDS}


def plain(answer, *named):
    """An answer without the ids that the question named."""
    text = str(answer)
    for one in named:
        text = text.replace(one, "IT")
    return text


def only(kind, told):
    """The one request of this class."""
    return next(one for one in told if isinstance(one, kind))


def test_a2_what_one_name_created_another_one_does_not_depose(world, tls, led):
    member, service = led
    forged = replace(service.grant, epoch=512 + 1, leader=1)
    for name in ("other", "stranger"):
        answer = ask(member.address, shown(tls, name), push.GrantRequest(grant=forged, sender=1, member=1))
        assert answer.error_code is ErrorCode.UNAUTHORISED
        assert "GRANT" in answer.error_message
    described = ask(member.address, shown(tls, "owner"), requests(service.grant, world.outbox_id, 1, tp_in(world))[0])
    assert [grant.epoch for grant in described.grants] in ([], [256])


def test_a2_a_log_of_the_same_id_in_an_outbox_of_another_name_takes_no_call_from_its_leader(world, tls, led):
    """A reader knows the topic's id, and a caller that may create outboxes makes a log with that id in its own
    outbox.
    """
    (member, service), tp = led, tp_in(world)
    told = requests(service.grant, world.outbox_id, 1, tp)
    look = told[0]
    by_tp = [one for one in told if isinstance(one, (push.AppendRecordsRequest, push.EndOffsetForEpochRequest))]
    by_tp += [only(push.FetchRecordsRequest, told), only(push.RepairRecordsRequest, told)]
    owner, other = shown(tls, "owner"), shown(tls, "other")
    assert ask(member.address, owner, look).error_code is ErrorCode.NONE
    before = [codes(ask(member.address, owner, one)) for one in by_tp]
    taken = push.DescribeLogRequest(outbox_id=FOREIGN, member=0, create=True, partitions=(tp,))
    assert codes(ask(member.address, other, taken)) == {ErrorCode.NONE}
    assert [codes(ask(member.address, owner, one)) for one in by_tp] == before
    fetched = only(push.FetchRecordsRequest, told)
    assert ask(member.address, owner, fetched).log_end_offset == 20
    assert ask(member.address, other, fetched).log_end_offset == 0, "of its own log"
    assert ask(member.address, owner, look).logs[0].log_end_offset == 20
    assert ask(member.address, other, fetched).log_end_offset == 0, "whoever was described last"


def test_a2_a_copy_of_outbox_json_appends_nothing_to_the_replica_of_another_name(world, tls, tmp_path):
    member = world.node(1, certificates=server_files(tls), allow=frozenset({"owner", "other"}))
    given = {"replicas": [str(member.address)]}
    with Outbox.open(
        tmp_path / "own", "orders", 1, "billing", **outbox_arguments(push=shown(tls, "owner"), **given)
    ) as outbox:
        assert outbox.append(0, b"record").result(WAIT_S) == 0
        home = world.nodes[1].directory / outbox.identity.outbox_id
    (tmp_path / "stolen").mkdir()
    shutil.copy(tmp_path / "own" / "outbox.json", tmp_path / "stolen")
    before = tree(home)
    settings = {"push": shown(tls, "other"), "open_timeout_s": 0.5, **given}
    with Outbox.open(tmp_path / "stolen", "orders", 1, "billing", **outbox_arguments(**settings)) as stolen:
        with pytest.raises(NotEnoughReplicas):
            stolen.append(0, b"forged").result(WAIT_S)
        assert tree(home) == before
    assert world.nodes[1].access.refusals()["DESCRIBE_LOG", "other"] > 0


def test_a2_an_outbox_without_an_owner_is_bound_to_the_first_name_that_leads_it(world, tls, led, caplog):
    (member, service), tp = led, tp_in(world)
    world.nodes[1].stop()
    (world.nodes[1].directory / str(world.outbox_id) / "owner.json").unlink()
    member = world.node(1, certificates=server_files(tls), allow=frozenset({"owner", "other"}))
    look = requests(service.grant, world.outbox_id, 1, tp)[1]
    assert ask(member.address, shown(tls, "owner"), look).error_code is ErrorCode.NONE
    wait_until(lambda: "had no owner: it is 'owner' from now on" in caplog.text, "its leader is back, too")
    assert ask(member.address, shown(tls, "other"), look).error_code is ErrorCode.UNAUTHORISED


def test_a2_identities_that_the_grant_names_lead_the_outbox(world, tmp_path):
    """The leader knows the certificate of each member's node: a new leader there may use that certificate."""
    trial_certificates(tmp_path, ("node-1=127.0.0.1", "node-2=127.0.0.1", "owner"))
    nodes = []
    for index in (1, 2):
        files = CertificateFiles(tmp_path / f"node-{index}.pem", tmp_path / f"node-{index}.key", tmp_path / "ca.pem")
        nodes.append(world.node(index, certificates=files, allow=frozenset({"owner"})))
    replicas = [str(node.address) for node in nodes]
    settings = {"push": shown(tmp_path, "owner"), "open_timeout_s": WAIT_S}
    with Outbox.open(
        tmp_path / "outbox", "orders", 1, "billing", **outbox_arguments(replicas=replicas, **settings)
    ) as outbox:
        outbox.append(0, b"record").result(WAIT_S)
        outbox_id = UUID(outbox.identity.outbox_id)
    own = world.nodes[1].directory / str(outbox_id)
    named = find_election_state(own, REAL_FILESYSTEM)[1].grant
    assert [one.identity for one in named.members] == ["", "node-1", "node-2"]
    with world.nodes[1].hand_over(outbox_id) as contact:
        push_by = shown(tmp_path, "node-1")
        done = promote(own, push=push_by, last_contact=contact, catch_up=True, depose=True, timeout_s=WAIT_S)
    assert done.grant.leader == 1
    with Outbox.open(
        own, "orders", 1, "billing", **outbox_arguments(replicas=replicas[1:], **settings | {"push": push_by})
    ) as outbox:
        assert outbox.append(0, b"another").result(WAIT_S) == 1
        look = push.ListLogsRequest(outbox_id=outbox_id)
        assert ask(nodes[1].address, push_by, look).error_code is ErrorCode.NONE
        start = push.DescribeLogRequest(outbox_id=uuid4(), member=0, create=True, partitions=(tp_of(outbox.log(0)),))
        assert ask(nodes[1].address, push_by, start).error_code is ErrorCode.UNAUTHORISED


def test_a2_whom_a_new_grant_names_leads_at_once(world, tls, led):
    """Though the node refused it a moment ago."""
    member, service = led
    look = push.ListLogsRequest(outbox_id=world.outbox_id)
    assert ask(member.address, shown(tls, "other"), look).error_code is ErrorCode.UNAUTHORISED
    members = tuple(replace(one, identity="other") if one.index == 1 else one for one in service.grant.members)
    grant = replace(service.grant, epoch=service.grant.epoch + 256, members=members)
    offered = push.GrantRequest(grant=grant, sender=grant.leader, member=1)
    assert ask(member.address, shown(tls, "owner"), offered).error_code is ErrorCode.NONE
    assert ask(member.address, shown(tls, "other"), look).error_code is ErrorCode.NONE


def test_a4_operators_calls_are_audited_with_identity_and_arguments(world, tls, led, caplog):
    member, service = led
    caplog.set_level("INFO", "pushrep.node.audit")
    truncate = only(replay.TruncateRequest, requests(service.grant, world.outbox_id, 1, tp_in(world)))
    ask(member.address, shown(tls, "stranger"), truncate)
    elsewhere = replace(truncate, recording_id=77)  # of nothing that this one may keep
    assert ask(member.address, shown(tls, "keeper"), elsewhere).error_code is ErrorCode.UNAUTHORISED
    assert "audit:" not in caplog.text
    told = only(push.GrantRequest, requests(service.grant, world.outbox_id, 1, tp_in(world)))
    ask(member.address, shown(tls, "owner"), told)
    assert "audit: 'owner' calls GRANT: grant=" in caplog.text
    ask(member.address, shown(tls, "keeper"), replace(truncate, offset=20))
    assert "audit: 'keeper' calls TRUNCATE: recording_id='1', offset='20'" in caplog.text


def test_a5_certificates_and_allow_list_are_read_again_without_ending_who_is_still_allowed(world, tmp_path, caplog):
    directory, allow = tmp_path / "tls", tmp_path / "allow"
    trial_certificates(directory, ("127.0.0.1", *NAMES))
    allow.write_text("# who may\nowner\nreader=orders:read\n")
    patient = ReplaySettings(connect_timeout_ms=3_600_000)  # nobody attaches
    member = world.node(1, certificates=server_files(directory), allow=frozenset(), allow_file=allow, replay=patient)
    node = world.nodes[1]
    service = world.service([member], settings=shown(directory, "owner")).start()
    service.append(b"before")
    assert service.wait() is None
    requests_of = requests(service.grant, world.outbox_id, 1, tp_in(world))
    start = only(replay.StartReplayRequest, requests_of)
    follow = replace(start, length_kind=replay.LengthKind.FOLLOW)
    started = ask(member.address, shown(directory, "reader"), follow)
    assert (started.error_code, len(node.replay_server.counters().sessions)) == (ErrorCode.NONE, 1)
    first = (directory / "ca.pem").read_bytes()
    for path in directory.iterdir():
        path.unlink()
    trial_certificates(directory, ("127.0.0.1", *NAMES), days=60)  # another authority
    allow.write_text("owner\n")
    node.reload()
    service.append(b"on the connection that was open")
    assert service.wait() is None
    assert (directory / "ca.pem").read_bytes() != first
    answer = ask(member.address, shown(directory, "reader"), start)  # by the new authority's certificate
    assert answer.error_code is ErrorCode.UNAUTHORISED
    wait_until(lambda: len(node.replay_server.counters().sessions) == 0, "who may not read any more is told so")
    allow.write_text("nonsense=\n")
    with pytest.raises(BadArgument, match="nonsense"):
        node.reload()
    assert ask(member.address, shown(directory, "owner"), requests_of[0]).error_code is ErrorCode.NONE


def test_a5_changed_files_are_noticed_and_expiry_is_told(world, tmp_path):
    directory, allow = tmp_path / "tls", tmp_path / "allow"
    trial_certificates(directory, ("127.0.0.1", "owner"), days=3)
    allow.write_text("owner\n")
    member = world.node(1, certificates=server_files(directory), allow=frozenset(), allow_file=allow)
    node = world.nodes[1]
    assert node.certificate_expires_s() == expires_s(directory / "ca.pem")
    look = push.ListLogsRequest(outbox_id=uuid4())
    assert ask(member.address, shown(directory, "owner"), look).error_code is ErrorCode.UNAUTHORISED
    allow.write_text("owner=*:list\n")
    node.reloading.soon()
    for _ in range(2000):
        if ask(member.address, shown(directory, "owner"), look).error_code is ErrorCode.NONE:
            break
    else:
        pytest.fail("the allow list was not read again")
    assert "certificate_expires" in {problem.name for problem in node.status().problems()}
    mine = shown(directory, "owner")
    before = mine.tls.expires_s
    trial_certificates(directory, ("127.0.0.1", "owner"), days=2)
    mine.tls.reload()
    assert mine.tls.expires_s < before
    (directory / "owner.key").write_text("no key")
    with pytest.raises(BadArgument, match=r"owner\.key"):
        mine.tls.reload()
    assert ask(member.address, mine, look).error_code is ErrorCode.NONE
    (directory / "ca.pem").write_bytes(b"none")
    assert node.certificate_expires_s() is None, "its status ends with an error"


def test_a5_the_command_reads_rules_from_a_file_again_at_sighup_and_says_who_changed_what(tls, tmp_path):
    allow = tmp_path / "allow"
    allow.write_text("owner\n")
    files = server_files(tls)
    serve = ("replica", "serve", tmp_path / "copies", "--allow-file", allow, "--listen", "127.0.0.1:0")
    shows = ("--cert", files.cert, "--key", files.key, "--ca", files.ca)
    process = PythonProgram("-m", "pushrep.cli.main", *serve, *shows, has_errors=True)
    try:
        address = Address.parse(process.stdout.readline().split()[2].rstrip(","))
        look, stop = push.ListLogsRequest(outbox_id=uuid4()), replay.StopReplayRequest(recording_id=1)
        assert ask(address, shown(tls, "keeper"), look).error_code is ErrorCode.UNAUTHORISED
        allow.write_text("keeper=*:keep,list\n")
        process.send_signal(signal.SIGHUP)
        for _ in range(2000):
            if ask(address, shown(tls, "keeper"), look).error_code is ErrorCode.NONE:
                break
        assert ask(address, shown(tls, "keeper"), stop).error_code is ErrorCode.NONE
    finally:
        with process:
            process.terminate()
            said = process.stderr.read()
    assert process.returncode == 0
    assert "UNAUTHORISED (1 since the last such line): 'keeper' may not call LIST_LOGS" in said
    assert "audit: 'keeper' calls STOP_REPLAY: session_id='0', recording_id='1'" in said


def test_a5_a_file_that_changes_is_noticed_by_itself(tmp_path):
    path, noticed = tmp_path / "allow", threading.Event()
    path.write_text("owner\n")
    reloading = Reloading([path], noticed.set, look_every_s=0.01)
    reloading.start()
    try:
        assert not noticed.wait(0.1)
        path.write_text("owner\nother\n")
        assert noticed.wait(WAIT_S)
    finally:
        reloading.stop()


def test_a5_who_asks_for_it_has_all_read_again_though_no_file_looks_changed(tmp_path):
    path, read = tmp_path / "allow", threading.Event()
    path.write_text("owner\n")
    reloading = Reloading([path], read.set, look_every_s=3600)
    reloading.start()
    try:
        reloading.soon()
        assert read.wait(WAIT_S)
    finally:
        reloading.stop()


def test_a1_what_is_not_clear_is_refused_at_the_start():
    with pytest.raises(BadArgument, match="role"):
        NodeSettings(allow=frozenset({"ann=orders:reed"}))


def test_a1_without_tls_a_peer_is_local_or_anonymous(world, caplog):
    here, everywhere = Address("127.0.0.1", 7400), Address("0.0.0.0", 7400)
    assert NodeSettings(address=here).plain_identity == "local"
    assert NodeSettings(address=everywhere, plain_off_loopback=True).plain_identity == "anonymous"
    member = world.node(1, allow=frozenset({"local=orders*:create,lead"}))
    service = world.service([member]).start()
    service.append(b"by its topic")
    assert service.wait() is None
    assert [log.log_end_offset for log in ask(member.address, PushSettings(), push.ListLogsRequest()).logs] == [1]
    delete = replay.DeleteRequest(recording_id=1)
    assert ask(member.address, PushSettings(), delete).error_code is ErrorCode.UNAUTHORISED
    assert world.nodes[1].access.refusals() == {("DELETE", "local"): 1}


def test_certificates_of_a_trial_are_made_added_and_renewed(tmp_path):
    tls = tmp_path / "tls"
    trial_certificates(tls, ("127.0.0.1", "billing"))
    assert {path.name for path in tls.glob("*.pem")} == {"ca.pem", "127.0.0.1.pem", "billing.pem"}
    authority = (tls / "ca.pem").read_bytes()
    trial_certificates(tls, ("spiffe://x/ops", "node-1=replica-1,127.0.0.1"), days=5)
    assert (tls / "ca.pem").read_bytes() == authority
    assert (tls / "billing.key").stat().st_mode & 0o777 == 0o600
    assert _names_in(tls / "spiffe___x_ops.pem") == "URI:spiffe://x/ops"
    assert _names_in(tls / "node-1.pem") == "DNS:replica-1, IP Address:127.0.0.1"


def _names_in(certificate):
    shown = ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout.splitlines()[1].strip()
