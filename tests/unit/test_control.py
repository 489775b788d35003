"""The control socket: its messages (sans-IO), its path, and which process answers.

Contract: "An open outbox answers ... on a Unix socket in its directory (`control.sock`, mode 0600)".
"""

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep import Outbox
from pushrep.errors import BadArgument
from pushrep.outbox.control import (
    ANSWER_BYTES_MAX,
    CONNECTIONS_MAX,
    QUESTION_BYTES_MAX,
    BadControlMessage,
    CallRefused,
    ControlServer,
    Lines,
    NobodyAnswers,
    Question,
    answer_bytes,
    ask,
    connect_to,
    question_bytes,
    question_in,
    refusal_bytes,
    value_in,
)
from tests.programs import PythonProgram

WAIT_S = 30


# ---- what is said


def test_a_question_and_its_answer_are_these_bytes():
    question = question_bytes(Question(call="partitions", arguments={"first": 3}))
    assert question == b'{"version":1,"call":"partitions","arguments":{"first":3}}\n'
    assert answer_bytes([1]) == b'{"version":1,"ok":[1]}\n'
    assert refusal_bytes("NotLeader", "member 2") == b'{"version":1,"error":"NotLeader","why":"member 2"}\n'


@given(cuts=st.lists(st.integers(1, 40), max_size=8), count=st.integers(1, 4))
def test_lines_come_whole_however_they_are_cut(cuts, count):
    data = b"".join(question_bytes(Question(call=f"call-{n}")) for n in range(count))
    lines, found = Lines(QUESTION_BYTES_MAX), []
    for cut in [*cuts, len(data)]:
        found += lines.feed(data[:cut])
        data = data[cut:]
    assert [question_in(said).call for said in found] == [f"call-{n}" for n in range(count)]


@given(st.binary(max_size=300))
def test_whatever_comes_is_an_object_or_a_bad_message(data):
    lines = Lines(100)
    try:
        for said in lines.feed(data):
            assert isinstance(said, dict)
            question_in(said)
    except (BadControlMessage, CallRefused):
        pass


@pytest.mark.parametrize(
    "line",
    [b"[]\n", b"1\n", b"\xff\n", b"{\n", b"[" * 90 + b"\n", b"x" * 101, b"x" * 101 + b"\n"],
    ids=["list", "number", "no UTF-8", "no JSON", "deep", "too long", "too long and whole"],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(BadControlMessage):
        Lines(100).feed(line)


def test_a_nest_that_json_cannot_bear_is_a_bad_message():
    with pytest.raises(BadControlMessage):
        Lines(1 << 20).feed(b"[" * 500_000 + b"\n")


@pytest.mark.parametrize(
    "said",
    [{}, {"version": "1"}, {"version": True}, {"version": 1}, {"version": 1, "call": 1},
     {"version": 1, "call": "status", "arguments": []}],
    ids=str,
)  # fmt: skip
def test_an_object_that_is_no_question_is_refused(said):
    with pytest.raises(BadControlMessage):
        question_in(said)


def test_another_version_is_refused_by_name():
    with pytest.raises(CallRefused, match="version 2") as refused:
        question_in({"version": 2, "call": "status"})
    assert refused.value.kind == "UnsupportedVersion"


def test_an_answer_says_ok_or_why_not():
    assert value_in(json.loads(answer_bytes({"a": None}))) == {"a": None}
    with pytest.raises(CallRefused, match="member 2") as refused:
        value_in(json.loads(refusal_bytes("NotLeader", "member 2")))
    assert refused.value.kind == "NotLeader"
    with pytest.raises(BadControlMessage):
        value_in({"version": 1})


def test_what_is_too_long_is_refused_before_it_is_sent():
    with pytest.raises(BadControlMessage):
        question_bytes(Question(call="x" * QUESTION_BYTES_MAX))
    with pytest.raises(CallRefused) as refused:
        value_in(json.loads(answer_bytes("x" * ANSWER_BYTES_MAX)))
    assert refused.value.kind == "AnswerTooLarge"


# ---- who answers, and where


@pytest.fixture
def serve(tmp_path):
    """serve(calls, directory) starts a server; all are closed at the end."""
    made = []

    def start(calls, directory=tmp_path):
        made.append(ControlServer(directory, calls))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_calls_are_answered_and_refusals_name_their_error(serve, tmp_path, caplog):
    def refuse(_):
        raise BadArgument("index", "give one")

    def fail(_):
        raise ZeroDivisionError("a fault")

    serve({"echo": lambda arguments: arguments["what"], "refuse": refuse, "fail": fail})
    assert ask(tmp_path, "echo", {"what": [1, "ü"]}) == [1, "ü"]
    for call, kind in (("refuse", "BadArgument"), ("fail", "ZeroDivisionError"), ("unheard", "UnknownCall")):
        with pytest.raises(CallRefused) as refused:
            ask(tmp_path, call)
        assert refused.value.kind == kind
    assert "fail" in caplog.text, "a fault of ours stands in the log with its traceback"
    assert ask(tmp_path, "echo", {"what": 1}) == 1, "and the server goes on"


def test_the_socket_is_its_owners_alone_and_goes_with_the_server(serve, tmp_path):
    server = serve({})
    mode = (tmp_path / "control.sock").lstat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    server.close()
    server.close()
    assert not (tmp_path / "control.sock").exists()
    with pytest.raises(NobodyAnswers):
        ask(tmp_path, "status")


def test_a_path_far_above_what_a_socket_may_have(serve, tmp_path):
    deep = tmp_path.joinpath(*["a-directory-with-a-long-name"] * 8)
    deep.mkdir(parents=True)
    assert len(str(deep)) > 200
    serve({"where": lambda _: "here"}, deep)
    assert ask(deep, "where") == "here"


def test_a_stale_socket_is_replaced_and_something_else_is_not(serve, tmp_path, monkeypatch):
    left = socket.socket(socket.AF_UNIX)
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        left.bind("control.sock")
    left.close()  # as a killed process leaves it
    with pytest.raises(NobodyAnswers, match="no process has it open"):
        ask(tmp_path, "where")
    server = serve({"where": lambda _: "here"})
    assert ask(tmp_path, "where") == "here"
    server.close()
    (tmp_path / "control.sock").write_text("somebody's notes")
    with pytest.raises(FileExistsError):
        serve({})
    assert (tmp_path / "control.sock").read_text() == "somebody's notes"


def test_nonsense_ends_its_connection_and_nobody_elses(serve, tmp_path):
    serve({"where": lambda _: "here"})
    for nonsense in (b"GET / HTTP/1.1\r\n", b"\x00\x00\x00\x10" * 10 + b"\n", b"x" * (QUESTION_BYTES_MAX + 2)):
        with connect_to(tmp_path, WAIT_S) as peer:
            peer.sendall(nonsense)
            answer = b""
            while part := peer.recv(4096):
                answer += part
        assert json.loads(answer)["error"] == "BadControlMessage"
    assert ask(tmp_path, "where") == "here"


def test_so_many_peers_are_served_and_no_more(serve, tmp_path):
    serve({"where": lambda _: "here"})
    peers = []
    try:
        for _ in range(CONNECTIONS_MAX):
            peer = connect_to(tmp_path, WAIT_S)
            peers.append(peer)
            peer.sendall(question_bytes(Question(call="where")))
            assert json.loads(peer.recv(4096))["ok"] == "here"
        with pytest.raises((NobodyAnswers, BadControlMessage)):
            ask(tmp_path, "where")
    finally:
        for peer in peers:
            peer.close()


def test_a_slow_call_holds_up_nobody_and_is_answered_at_the_close(serve, tmp_path):
    began, let_go, answers = threading.Event(), threading.Event(), []

    def slow(_):
        began.set()
        assert let_go.wait(WAIT_S)
        return "done"

    server = serve({"slow": slow, "where": lambda _: "here"})
    asking = threading.Thread(target=lambda: answers.append(ask(tmp_path, "slow")))
    asking.start()
    assert began.wait(WAIT_S)
    assert ask(tmp_path, "where") == "here"
    closing = threading.Thread(target=server.close)
    closing.start()
    let_go.set()
    closing.join(WAIT_S)
    asking.join(WAIT_S)
    assert answers == ["done"]


# ---- an outbox


def test_an_open_outbox_answers_its_status_and_a_closed_one_does_not(tmp_path):
    with Outbox.open(tmp_path / "outbox", "orders", 3, "billing") as outbox:
        outbox.append(1, b"a").result(WAIT_S)
        status = ask(outbox.directory, "status")
        own = json.loads(json.dumps(outbox.status().as_dict()))
        # The disk is everybody's: what others write between the two questions is no part of what is compared.
        assert isinstance(status["disk"].pop("used_bytes"), int)
        assert own["disk"].pop("used_bytes") > 0
        assert (status.pop("parts"), len(own.pop("parts"))) == ([], 3)
        assert status == own
        assert (status["topic"], status["partitions"], status["state"]) == ("orders", 3, "alone")
        assert (status["pid"], status["log_end_offsets"]) == (os.getpid(), 1)
        parts = ask(outbox.directory, "status", {"first": 1, "count": 5})["parts"]
        assert [(part["partition"], part["log_end_offset"]) for part in parts] == [(1, 1), (2, 0)]
        with pytest.raises(CallRefused, match="first"):
            ask(outbox.directory, "status", {"first": -1})
    with pytest.raises(NobodyAnswers):
        ask(outbox.directory, "status")


def test_a_killed_outbox_leaves_a_socket_that_the_next_one_replaces(tmp_path):
    program = (
        "import os, sys; from pushrep import Outbox; Outbox.open(sys.argv[1], 'orders', 1, 'billing'); "
        "os.kill(os.getpid(), 9)"
    )
    with PythonProgram("-c", program, tmp_path) as killed:
        assert killed.wait(WAIT_S) == -9
    assert (tmp_path / "control.sock").exists()
    with pytest.raises(NobodyAnswers):
        ask(tmp_path, "status")
    with Outbox.open(tmp_path, "orders", 1, "billing"):
        assert ask(tmp_path, "status")["pid"] == os.getpid()


def test_a_forked_child_answers_nobody_and_keeps_nobody_waiting(tmp_path):
    """The parent is killed and its child lives on: a client gets the error at once that no process answers."""
    program = """
import os, sys, time
from pushrep import Outbox
outbox = Outbox.open(sys.argv[1], "orders", 1, "billing")
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
while True:
    time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(parent.stdout.readline())
        assert ask(tmp_path, "status")["pid"] == parent.pid
        parent.kill()
        parent.wait(WAIT_S)
        with pytest.raises(NobodyAnswers, match="no process has it open"):
            ask(tmp_path, "status", timeout_s=WAIT_S)
        os.kill(child, 0)  # it lives still
    finally:
        parent.kill()
        parent.stdin.close()
        parent.wait(WAIT_S)
        parent.stdout.close()


def test_where_no_socket_can_be_the_outbox_goes_on_without(tmp_path, caplog):
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / "control.sock").mkdir()
    with (
        caplog.at_level(logging.WARNING, "pushrep.outbox"),
        Outbox.open(tmp_path / "outbox", "orders", 1, "b") as outbox,
    ):
        assert outbox.append(0, b"a").result(WAIT_S) == 0
    assert "control socket" in caplog.text
