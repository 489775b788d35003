"""Standing by: what it refuses, which states it reports, and that it ends when it is cancelled."""

import asyncio
import http.client
import json
import signal
import threading
from contextlib import closing
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry

from pushrep import Acks, AsyncOutbox, Outbox, ReplicaNode
from pushrep.cli.main import run
from pushrep.election.candidate import MemberAnswer
from pushrep.election.errors import CantStandBy
from pushrep.election.grants import Grant, Member
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.env.checked_json import write_checked_json
from pushrep.errors import BadArgument
from pushrep.health import HealthSettings
from pushrep.outbox import OutboxDiffers, StandbyCancelled, StandbyState
from pushrep.outbox.control import ask
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.outbox.standby import round_s
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election_state import ElectionState, write_election_state
from pushrep.replicate.member_clients import Ending, MemberAnswers
from pushrep.replicate.settings import PushSettings
from pushrep.status.metrics import StatusCollector
from tests.ports import reserve
from tests.support.outbox_arguments import outbox_arguments
from tests.unit.gated_disk import until

WAIT_S = 20
CANCELLED = threading.Event()
CANCELLED.set()


def grant(number=1, **changes):
    fields = {
        "outbox_id": UUID(int=number), "epoch": 256, "leader": 0, "members": tuple(map(Member, range(3))),
        "min_insync_replicas": 2, "members_epoch": 0, "pid_epoch": 0, "topic_id": UUID(int=2), "topic": "orders",
        "partitions": 1, "carrier": "key",
    }  # fmt: skip
    return Grant(**fields | changes)


def keep(data, one, member=1):
    directory = data / str(one.outbox_id)
    directory.mkdir(parents=True)
    write_election_state(directory, one.outbox_id, ElectionState(grant=one, member=member), REAL_FILESYSTEM)


class Waiting:
    """A service that stands by, in a thread."""

    def __init__(self, directory, *, fails=False, **settings):
        self.fails = fails
        self.told, self.changed, self.cancel, self.error = [], threading.Condition(), threading.Event(), None
        arguments = (directory, "orders", 1, "billing")
        self.thread = threading.Thread(target=self.run, args=arguments, kwargs=settings)
        self.thread.start()

    def run(self, *arguments, **settings):
        try:
            Outbox.stand_by(*arguments, **outbox_arguments(cancel=self.cancel, on_state=self.tell, **settings))
        except StandbyCancelled as error:
            self.error = error

    def tell(self, state, why):
        with self.changed:
            self.told.append((state, why))
            self.changed.notify_all()
        if self.fails:
            raise ZeroDivisionError

    def wait_for(self, state, why):
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(told is state and why in reason for told, reason in self.told), WAIT_S
            ), self.told

    def end(self):
        self.cancel.set()
        self.thread.join(WAIT_S)
        assert isinstance(self.error, StandbyCancelled)
        assert "pushrep-positions" not in {one.name for one in threading.enumerate()}, "it reads the logs no more"


def test_it_waits_until_the_outbox_is_made_and_then_for_its_leader(tmp_path):
    waiting = Waiting(tmp_path / "data")
    try:
        waiting.wait_for(StandbyState.WAITING, "pushrep outbox create")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "replica-epoch.json").write_text("{}")
        keep(tmp_path / "data", grant())
        waiting.wait_for(StandbyState.STANDING_BY, "member 0 was in contact")
        until(lambda: "pushrep-positions" in {one.name for one in threading.enumerate()}, "it reads the logs meanwhile")
    finally:
        waiting.end()


def test_an_on_state_that_raises_is_logged_and_keeps_nobody_from_standing_by(tmp_path, caplog):
    waiting = Waiting(tmp_path / "data", fails=True)
    try:
        waiting.wait_for(StandbyState.WAITING, "pushrep outbox create")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "replica-epoch.json").write_text("{}")
        keep(tmp_path / "data", grant())
        waiting.wait_for(StandbyState.STANDING_BY, "member 0 was in contact")
    finally:
        waiting.end()
    assert isinstance(waiting.error, StandbyCancelled)
    failed = [one for one in caplog.records if one.exc_info is not None]
    assert {one.exc_info[0] for one in failed} == {ZeroDivisionError}
    assert failed[0].getMessage() == "on_state failed for the state waiting"


def test_a_node_shows_who_stands_by_and_why(tmp_path, caplog):
    caplog.set_level("INFO", "pushrep.outbox")
    with ReplicaNode(tmp_path / "data") as node, HandoverSocket(node):
        keep(tmp_path / "data", grant())
        waiting = Waiting(tmp_path / "data")
        try:
            waiting.wait_for(StandbyState.STANDING_BY, "member 0 was in contact")
            asked, shown = threading.Event(), []
            while not shown or shown[0]["state"] != "standing_by":
                assert not asked.wait(0.05)
                shown = ask(tmp_path / "data", "status")["standbys"]
            registry = CollectorRegistry()
            registry.register(StatusCollector(node.status))
            labels = {"outbox": str(UUID(int=1)), "state": "standing_by"}
            assert registry.get_sample_value("pushrep_node_standby", labels) == 1
        finally:
            waiting.end()
    assert shown[0]["outbox_id"] == str(UUID(int=1))
    assert "member 0 was in contact" in shown[0]["why"]
    assert "standing_by: member 0 was in contact" in caplog.text


def test_a_node_shows_who_waits_for_an_outbox_that_is_not_made(tmp_path):
    with ReplicaNode(tmp_path / "data") as node, HandoverSocket(node):
        waiting = Waiting(tmp_path / "data")
        try:
            asked, shown = threading.Event(), []
            while not shown:
                assert not asked.wait(0.05)
                shown = ask(tmp_path / "data", "status")["standbys"]
        finally:
            waiting.end()
    (one,) = shown
    assert (one["outbox_id"], one["state"]) == ("", "waiting")


@pytest.mark.parametrize("asks_again", [False, True])
def test_who_lets_go_in_time_is_asked_again_while_too_few_answered(asks_again):
    """Two that look at once refuse each other: neither's node has its directory."""
    told = [MemberAnswer(index=1, grant=None, highest_epoch=-1), NodeUnreachable("b:1", "it is handed over for now")]

    def question():
        if isinstance(one := told.pop(), Exception):
            raise one
        return one

    answers = MemberAnswers(PushSettings(), SYSTEM_CLOCK, WAIT_S, Ending(PushSettings()))
    answers.asks_again = asks_again
    answers.ask("1", question)
    assert (answers.next() is None) is not asks_again


@pytest.mark.parametrize("count", range(3, 8))
def test_no_two_standbys_look_for_the_same_time(count):
    one = grant(members=tuple(map(Member, range(count))), min_insync_replicas=count // 2 + 1)
    times = [round_s(one, index) for index in range(1, count)]
    assert len(set(times)) == count - 1
    assert max(times) <= round_s(one, 0) <= 2.0, "who leads on has all the time"


@pytest.mark.parametrize(("used", "limit"), [(99, None), (50, 40)], ids=["by default", "by what was set"])
def test_a_full_disk_keeps_a_member_from_looking(tmp_path, monkeypatch, used, limit):
    """Another with room takes over."""
    keep(tmp_path, grant(), member=0)
    if limit is not None:
        kept = {f"disk_{level}_percent": limit for level in ("warn", "pressed", "refuse")}
        write_checked_json(REAL_FILESYSTEM, tmp_path / str(UUID(int=1)) / "settings.json", {"log": kept}, 1)
    full = type(REAL_FILESYSTEM.usage(tmp_path))(used, 100)
    monkeypatch.setattr(type(REAL_FILESYSTEM), "usage", lambda *_: full)
    waiting = Waiting(tmp_path / str(UUID(int=1)))
    try:
        waiting.wait_for(StandbyState.STANDING_BY, "disk is too full")
    finally:
        waiting.end()
    assert StandbyState.LOOKING not in {state for state, _ in waiting.told}


@pytest.mark.parametrize(
    ("one", "why"),
    [(grant(min_insync_replicas=1), "no majority"), (grant(members=(Member(0), Member(1))), "2 members")],
)
def test_an_outbox_that_no_standby_can_lead_is_refused(tmp_path, one, why):
    keep(tmp_path, one)
    with pytest.raises(CantStandBy, match=why):
        Outbox.stand_by(tmp_path / str(one.outbox_id), "orders", 1, "billing")


def test_two_outboxes_of_a_topic_have_to_be_named(tmp_path):
    (tmp_path / "replica-epoch.json").write_text("{}")
    for number in (1, 2):
        keep(tmp_path, grant(number))
    with pytest.raises(CantStandBy, match="name one of"):
        Outbox.stand_by(tmp_path, "orders", 1, "billing")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"replicas": ["a:1"]}, TypeError),
        ({"min_insync_replicas": 2}, BadArgument),
        ({"takeover_after_ms": 1_999}, BadArgument),
        ({"takeover_pause_ms": -1}, BadArgument),
        ({"acks": Acks.LOCAL}, TypeError),
        ({"linger_ms": -1}, BadArgument),
        ({"carrier": "headers"}, BadArgument),
        ({"health": "127.0.0.1:0"}, BadArgument),
        ({"linger": 5}, TypeError),
        ({"slots": 4}, TypeError),
    ],
)
def test_what_open_would_not_take_is_refused_before_it_waits(tmp_path, settings, error):
    """Otherwise the lead would be taken first, and lost with the process."""
    with pytest.raises(error):
        Outbox.stand_by(tmp_path, "orders", 1, "billing", **outbox_arguments(cancel=CANCELLED, **settings))


@pytest.mark.parametrize(
    ("place", "asked", "setting"),
    [
        ("", ("orders", 2, {}), "partitions"),
        ("", ("orders", 1, {"carrier": "header"}), "carrier"),
        (str(UUID(int=1)), ("order", 1, {}), "topic"),
    ],
)
def test_an_outbox_that_was_made_otherwise_is_refused_before_its_lead_is_taken(tmp_path, place, asked, setting):
    (tmp_path / "replica-epoch.json").write_text("{}")
    keep(tmp_path, grant(), member=0)  # its own lead: it would look at once
    topic, partitions, settings = asked
    with pytest.raises(OutboxDiffers, match=f"{setting}: this outbox was made with"):
        Outbox.stand_by(tmp_path / place, topic, partitions, "billing", **outbox_arguments(**settings))


def test_a_process_that_stands_by_answers_probes_and_is_not_ready(tmp_path):
    """An outbox answers them only once it leads; a standby that does not would be restarted, and alarm as down."""
    with reserve() as held:
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        waiting = Waiting(tmp_path / "data", health=HealthSettings(listen=listen))
        try:
            waiting.wait_for(StandbyState.WAITING, "pushrep outbox create")
            assert get(listen, "/livez")[0] == 200
            code, body = get(listen, "/readyz")
            (problem,) = json.loads(body)["problems"]
            assert (code, problem["problem"]) == (503, "not_leading")
            assert problem["why"].startswith("waiting: the outbox is not made yet")
            assert problem["since_ms"] > 0
            assert get(listen, "/leader") == (503, b'{"leads": false, "member": null, "address": ""}\n')
            code, body = get(listen, "/metrics")
            assert code == 200
            assert b"pushrep_build_info" in body
            assert b'pushrep_problem{problem="not_leading"' not in body, "a standby fires no alert"
        finally:
            waiting.end()
        with pytest.raises(OSError, match="refused"):
            get(listen, "/livez")


def get(listen, path):
    connection = http.client.HTTPConnection(listen, timeout=WAIT_S)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_runner_ships_and_answers_probes_where_it_is_told_to(tmp_path, monkeypatch, capfd):
    given = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    monkeypatch.setattr(Outbox, "stand_by", lambda *_, **settings: stopped(given, settings))
    properties = tmp_path / "client.properties"
    properties.write_text("security.protocol=SSL\n")
    command = ["outbox", "run", str(tmp_path), "orders", "--config", str(properties)]
    assert run([*command, "--", "true"]) == 2
    assert "--bootstrap-servers" in capfd.readouterr().err
    assert run([*command, "--bootstrap-servers", "a:9092", "--health", "127.0.0.1:9403", "--", "true"]) == 0
    (settings,) = given
    assert settings["health"].listen == "127.0.0.1:9403"
    assert (settings["kafka"].bootstrap_servers, settings["kafka"].security_protocol) == ("a:9092", "SSL")


def stopped(given, settings):
    given.append(settings)
    raise StandbyCancelled("data")


@pytest.mark.parametrize("place", ["", "slot-0"])
def test_worker_slots_are_refused_instead_of_waiting_for_ever(tmp_path, place):
    """A slot has no members: no grant would ever come."""
    with Outbox.open_slot(tmp_path, "orders", 1, "billing"):
        pass
    with pytest.raises(CantStandBy, match="a worker slot is an outbox of this machine alone"):
        Outbox.stand_by(tmp_path / place, "orders", 1, "billing", cancel=CANCELLED)


@pytest.mark.parametrize("settings", [{}, {"cancel": None}])
def test_a_task_that_is_cancelled_waits_no_more(tmp_path, settings):
    async def main():
        opening = AsyncOutbox.stand_by(tmp_path, "orders", 1, "billing", **outbox_arguments(on_state=told, **settings))
        task = asyncio.ensure_future(_opened(opening))
        await asyncio.to_thread(waits.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    waits = threading.Event()
    told = lambda state, why: waits.set()  # noqa: E731 - what it says does not matter here
    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "pushrep-async":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_the_callers_own_event_ends_the_wait_of_a_task_too(tmp_path):
    async def main():
        with pytest.raises(StandbyCancelled):
            await AsyncOutbox.stand_by(tmp_path, "orders", 1, "billing", **outbox_arguments(cancel=CANCELLED))

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


async def _opened(opening):
    return await opening
