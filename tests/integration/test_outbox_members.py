"""`pushrep replica add | remove | replace`: one member at a time, stored as grants, while the outbox takes records.

Contract, "Members, grants, epochs": an index is never reused; a new list takes effect only when enough members of it
hold everything below HWM and enough of both lists stored it; a new member counts in N only once it is in sync.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from time import monotonic

import pytest

from pushrep import Outbox, SegmentLog
from pushrep.cli.main import run
from pushrep.cli.status import look_at
from pushrep.election.errors import BadGrant
from pushrep.outbox import CommandRefused, OutboxDiffers, replication
from pushrep.outbox.control import CallRefused, ask
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.outbox.member_changes import Phase, add_member, remove_member
from pushrep.replicate.leading import Leading
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until


@pytest.fixture
def pushrep(capfd):
    def call(*arguments):
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return call


def address(world, index):
    return str(world.nodes[index].address)


def held(world, outbox, index):
    path = world.root / f"node-{index}" / outbox.identity.outbox_id / "orders-0"
    with SegmentLog.open_reader(path, isolation="written") as reader:
        return [record.value for record in reader.records(0)]


def finish(step):
    """Steps until it is done; the phases on the way."""
    phases = []

    def is_done():
        phases.append(step().phase)
        return phases[-1] is Phase.DONE

    wait_until(is_done, f"done: {phases[-3:]}")
    return phases


def test_a_member_is_added_while_records_come_and_then_counts(world, pushrep):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, partitions=1) as outbox:
        stop, offsets = threading.Event(), []

        def produce():
            while not stop.is_set():
                offsets.append(outbox.append(0, b"%d" % len(offsets)).result(WAIT_S))

        producing = threading.Thread(target=produce)
        producing.start()
        try:
            wait_until(lambda: len(offsets) > 20, "it produces")
            code, output, errors = pushrep("replica", "add", outbox.directory, address(world, 2))
            assert code == 0, errors
            assert f"member 2 ({address(world, 2)}) was added" in output
            before = len(offsets)
            wait_until(lambda: len(offsets) > before + 20, "it goes on")
        finally:
            stop.set()
            producing.join(WAIT_S)
        assert offsets == list(range(len(offsets))), "nothing was refused, nothing came twice"
        status = outbox.status()
        assert [one.index for one in status.members] == [0, 1, 2]
        assert (status.min_insync_replicas, status.is_changing) == (2, False)
        wait_for_all(outbox)
        assert held(world, outbox, 2) == held(world, outbox, 1) == [b"%d" % n for n in range(len(offsets))]
        world.nodes[1].stop()
        outbox.append(0, b"by the new one").result(WAIT_S)
    with pytest.raises(OutboxDiffers):
        open_outbox(world, 1)
    with open_outbox(world, 1, 2) as again:
        assert again.append(0, b"after").result(WAIT_S) == len(offsets) + 1


def test_a_new_member_counts_for_nothing_before_it_holds_everything(world):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, partitions=1) as outbox:
        outbox.append(0, b"first").result(WAIT_S)
        world.nodes[2].stop()
        where = address(world, 2)
        for _ in range(3):
            assert add_member(outbox.facts, where).phase is Phase.CATCHING_UP
        grant = outbox.facts.replication.grant
        assert grant.indexes == {0, 1}, "nobody was asked to count it"
        joining = outbox.status().members[2]
        assert (joining.index, joining.is_joining, joining.lag.records) == (2, True, 1)
        assert outbox.append(0, b"without it").result(WAIT_S) == 1
        world.node(2)
        phases = finish(lambda: add_member(outbox.facts, where))
        assert Phase.SETTLING in phases
        assert outbox.facts.replication.grant.indexes == {0, 1, 2}
        assert not any(one.is_joining for one in outbox.status().members)


def test_a_member_is_removed_and_its_index_is_never_anothers(world, pushrep):
    for index in (1, 2, 3):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"three").result(WAIT_S)
        wait_for_all(outbox)
        code, output, errors = pushrep("replica", "remove", outbox.directory, 2)
        assert code == 0, errors
        assert "member 2 was removed; members: 0 (here), 1" in output
        outbox.append(0, b"two").result(WAIT_S)
        wait_for_all(outbox)
        assert list(outbox.lag()) == [address(world, 1)], "it is not pushed to any more"
        code, output, _ = pushrep("replica", "add", outbox.directory, address(world, 3), "--json")
        assert code == 0
        assert json.loads(output)["member"] == 3
        code, output, _ = pushrep("replica", "add", outbox.directory, address(world, 2), "--json")
        assert (code, json.loads(output)["member"]) == (0, 4), "the same node, another member"
        outbox.append(0, b"four").result(WAIT_S)
        wait_for_all(outbox)
        assert outbox.status().min_insync_replicas == 3, "more than half, as it was"
        assert pushrep("replica", "remove", outbox.directory, 4)[0] == 0
        assert address(world, 2) not in outbox.lag(), "what was added here and removed here is not pushed to either"
    for index in (1, 2, 3):
        assert held(world, outbox, index) == [b"three", b"two", b"four"]


def test_faults_b10_whom_a_killed_command_was_adding_is_named_and_taken_up_or_dropped_by_the_next_change(
    world, monkeypatch
):
    """A command killed with -9 gives nothing up: the node would be pushed to for as long as the service runs."""
    world.node(1)
    world.node(2)
    with open_outbox(world, 1) as outbox:
        nobody = "127.0.0.1:1"
        assert add_member(outbox.facts, nobody).member == 2
        assert not any(one.is_left for one in outbox.status().members)
        monkeypatch.setattr(replication, "LEFT_MS", 0)
        (problem,) = look_at(str(outbox.directory))[0]["problems"]
        assert (problem["problem"], problem["subject"]) == ("replica_away", f"member 2 at {nobody}")
        assert problem["blocks"] == "nothing"
        assert problem["command"] == f"pushrep replica remove {outbox.directory} 2"
        assert add_member(outbox.facts, nobody).member == 2, "taken up"
        finish(lambda: add_member(outbox.facts, address(world, 2)))
        assert [(one.address, one.is_joining) for one in outbox.status().members[1:]] == [
            (address(world, 1), False), (address(world, 2), False),
        ]  # fmt: skip


def test_a_node_that_was_to_become_a_member_is_given_up(world, pushrep):
    """A mistyped address would be tried for as long as the service runs."""
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, partitions=2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        code, _, errors = pushrep("replica", "add", outbox.directory, "127.0.0.1:1", "--timeout", "0")
        assert code == 1
        assert f"pushrep replica remove {outbox.directory} 2" in errors
        assert "127.0.0.1:1 will become member 2; it does not count as a member yet" in errors
        assert outbox.status().members[2].is_joining
        printed = errors.partition("To give it up: ")[2].splitlines()[0]
        assert printed == f"pushrep replica remove {outbox.directory} 2"
        code, output, errors = pushrep(*printed.split()[1:])
        assert code == 0, errors
        assert "members: 0 (here), 1" in output
        assert [one.index for one in outbox.status().members] == [0, 1]
        threads = threading.enumerate
        wait_until(lambda: all(thread.name != "pushrep-sessions-2" for thread in threads()), "nobody tries it any more")

        epoch = outbox.facts.replication.grant.epoch
        where = address(world, 2)
        add_member(outbox.facts, where)
        wait_until(lambda: outbox.lag()[where].records == 0, "a node that answers gets everything")
        remove_member(outbox.facts, 2)
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        assert where not in outbox.lag()
        assert outbox.facts.replication.grant.epoch == epoch, "members did not change"
        finish(lambda: add_member(outbox.facts, where))
        wait_for_all(outbox)
    assert held(world, outbox, 2) == [b"a", b"b"]


def test_a_dead_member_is_replaced_by_another_node(world, pushrep):
    for index in (1, 2, 3):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[2].stop()
        code, output, errors = pushrep("replica", "replace", outbox.directory, 2, address(world, 3))
        assert code == 0, errors
        assert "member 2 was replaced by member 3" in output
        assert [one.index for one in outbox.status().members] == [0, 1, 3]
        assert outbox.status().min_insync_replicas == 2
        outbox.append(0, b"b").result(WAIT_S)
        wait_for_all(outbox)
    assert held(world, outbox, 3) == [b"a", b"b"]


def test_while_nobody_has_the_outbox_open_the_command_opens_it(world, pushrep):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
    code, output, errors = pushrep("replica", "add", outbox.directory, address(world, 2))
    assert code == 0, errors
    assert "member 2" in output
    assert not (outbox.directory / "control.sock").exists()
    with open_outbox(world, 1, 2, partitions=1) as again:
        assert again.append(0, b"b").result(WAIT_S) == 1
        wait_for_all(again)
        assert held(world, again, 2) == [b"a", b"b"]
    code, output, errors = pushrep("replica", "remove", outbox.directory, 1)
    assert code == 0, errors
    with open_outbox(world, 2, partitions=1) as again:
        assert [one.index for one in again.status().members] == [0, 2]


def test_what_can_not_be_changed_is_refused_by_name(world, tmp_path, pushrep):
    world.node(1)
    with open_outbox(world, 1, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        with pytest.raises(CommandRefused, match="promote another"):
            remove_member(outbox.facts, 0)
        with pytest.raises(CommandRefused, match="no member 7"):
            remove_member(outbox.facts, 7)
        for call, arguments in (
            ("add-member", {"address": "nowhere"}), ("remove-member", {"index": "1"}),
            ("remove-member", {"index": True}), ("add-member", {"address": "a:1", "min_insync_replicas": "2"}),
        ):  # fmt: skip
            with pytest.raises(CallRefused) as refused:
                ask(outbox.directory, call, arguments)
            assert refused.value.kind == "BadArgument"
        epoch = outbox.facts.replication.grant.epoch
        with pytest.raises(BadGrant, match="min_insync_replicas = 9 of 1"):
            remove_member(outbox.facts, 1, 9)
        assert outbox.facts.replication.grant.epoch == epoch, "refused before anything stopped"
        code, _, errors = pushrep("replica", "remove", outbox.directory, 7)
        assert code == 1
        assert "there is no member 7" in errors
        assert pushrep("replica", "add", outbox.directory, "nowhere")[0] == 2
        world.nodes[1].stop()
        outbox.lag()
        code, _, errors = pushrep("replica", "add", outbox.directory, "127.0.0.1:1", "--timeout", "0")
        assert code == 1
        assert "still catching up" in errors
        assert "run the same command again" in errors
        assert outbox.facts.replication.grant.indexes == {0, 1}
    with Outbox.open(tmp_path / "alone", "orders", 1, "billing") as alone:
        code, _, errors = pushrep("replica", "add", alone.directory, "127.0.0.1:1")
        assert code == 1
        assert "open it with replicas=['HOST:PORT']" in errors


def test_where_the_outbox_is_another_members_or_a_nodes_that_is_said(world, pushrep):
    world.node(1)
    node = world.nodes[1]
    with open_outbox(world, 1) as outbox, HandoverSocket(node):
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        copy = node.directory / outbox.identity.outbox_id
        code, _, errors = pushrep("replica", "add", copy, "127.0.0.1:1")
        assert code == 1
        whose = f"member 1's copy of outbox {outbox.identity.outbox_id} of topic orders, which member 0 leads"
        assert f"it is {whose}: run this in the directory of that member's service" in errors
        code, _, errors = pushrep("replica", "add", node.directory, "127.0.0.1:1")
        assert code == 1
        assert "it is a node's directory: name the directory of the service whose outbox it is" in errors
        assert f"pushrep status {node.directory} shows whose copies it keeps" in errors


def test_a_change_that_was_interrupted_goes_on_after_the_next_open(world):
    """The joint grant is stored, and the caller is gone: both lists have a vote until the change is requested again."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_until(lambda: add_member(outbox.facts, address(world, 2)).phase is Phase.SETTLING, "a joint grant")
        joint = outbox.facts.replication.grant
    with open_outbox(world, 1, 2, partitions=1) as again:
        grant = again.facts.replication.grant
        assert grant.epoch > joint.epoch
        assert [member.index for member in grant.previous_members] == [0, 1], "a renewal settles nothing"
        assert again.status().is_changing
        assert again.append(0, b"b").result(WAIT_S) == 1
        finish(lambda: add_member(again.facts, address(world, 2)))
        assert not again.status().is_changing
        assert again.facts.replication.grant.indexes == {0, 1, 2}
        wait_for_all(again)
    assert held(world, again, 2) == [b"a", b"b"]


def test_two_who_ask_for_the_same_at_once_make_one_member(world):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        problems, pause = [], threading.Event()

        def ask_on():
            for _ in range(WAIT_S * 50):
                try:
                    if ask(outbox.directory, "add-member", {"address": address(world, 2)})["phase"] == "done":
                        return
                except CallRefused as refused:
                    problems.append(refused)
                pause.wait(0.02)
            problems.append("never done")

        asking = [threading.Thread(target=ask_on) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(WAIT_S)
        assert not problems
        assert [one.index for one in outbox.status().members] == [0, 1, 2]
        assert outbox.append(0, b"b").result(WAIT_S) == 1


def test_a_close_waits_for_a_thread_that_is_just_beginning(world, monkeypatch):
    """A member shows its directory while the outbox closes: the thread that names it is made, and has not begun."""
    begins, may_begin, start = threading.Event(), threading.Event(), threading.Thread.start

    def slowly(thread):
        if thread.name == "pushrep-directories":
            begins.set()
            may_begin.wait(WAIT_S)
        start(thread)

    for index in (1, 2):
        world.node(index)
    monkeypatch.setattr(threading.Thread, "start", slowly)
    with open_outbox(world, 1) as outbox, ThreadPoolExecutor(1) as others:
        try:
            wait_until(lambda: add_member(outbox.facts, address(world, 2)) and begins.is_set(), "it is named")
            closing = others.submit(outbox.close)
            wait([closing], timeout=0.5)  # if it does not wait, it fails at once
        finally:
            may_begin.set()
        closing.result(WAIT_S)


def never_in_sync(monkeypatch):
    """From now on no session begins: the members answer, and acknowledge nothing. The event is set at the first one."""
    begins = threading.Event()
    monkeypatch.setattr(Leading, "start_session", lambda *_: begins.set())
    return begins


def test_a_close_first_ends_a_change_of_members(world, monkeypatch):
    """The change waits for open_timeout_s for members in sync, and nothing is written meanwhile."""
    for index in (1, 2):
        world.node(index)
    outbox = open_outbox(world, 1, 2, close_timeout_s=1, open_timeout_s=WAIT_S)
    outbox.append(0, b"a").result(WAIT_S)
    wait_for_all(outbox)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as others:
        begins = never_in_sync(patch)
        changing = others.submit(remove_member, outbox.facts, 2)
        assert begins.wait(WAIT_S)
        outbox.close()
        wait([changing], timeout=WAIT_S)
    with open_outbox(world, 1) as again:
        assert again.append(0, b"b").result(WAIT_S) == 1


def silence(world, index):
    """The member takes connections, and never answers."""
    world.nodes[index].stop()
    world.ports[index].listen()


def timed(pushrep, *arguments):
    began_s = monotonic()
    code, _, errors = pushrep(*arguments)
    assert code == 1
    return monotonic() - began_s, errors


def test_a_command_ends_after_its_timeout_whoever_works_at_it(world, pushrep):
    """A call waits for a member that never answers, by itself for request_timeout_ms."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        silence(world, 2)
        took_s, errors = timed(pushrep, "replica", "remove", outbox.directory, 2, "--timeout", "3")
        assert took_s < 3 + 2
        assert "the change is not done after 3 s" in errors
        silence(world, 1)
    took_s, errors = timed(pushrep, "replica", "remove", outbox.directory, 2, "--timeout", "3")
    assert took_s < 3 + 2
    assert "1 of 2 needed members count; [1, 2] do not answer" in errors


def test_nobody_is_told_that_members_which_answer_are_destroyed(world, pushrep, monkeypatch):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        never_in_sync(monkeypatch)
        code, _, errors = pushrep("replica", "remove", outbox.directory, 2, "--timeout", "1")
        assert code == 1
        assert "the change is not finished" in errors
        assert "--lost" not in errors
        assert "answer" not in errors
