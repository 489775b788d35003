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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pushrep import Outbox
from pushrep.errors import BadArgument
from pushrep.outbox import control
from pushrep.outbox.control import (
    CONNECTIONS_MAX,
    QUESTION_BYTES_MAX,
    CallRefused,
    ControlServer,
    NobodyAnswers,
    ask,
    ask_over,
    connect_to,
)
from tests.programs import PythonProgram

WAIT_S = 30


# ---- what is said


def talk(directory, *parts):
    """Everything that the server says to these bytes, which are sent one after the other; then the connection ends."""
    answer = b""
    with connect_to(directory, WAIT_S) as peer:
        for part in parts:
            peer.sendall(part)
        peer.shutdown(socket.SHUT_WR)
        while part := peer.recv(4096):
            answer += part
    return answer


def question(**fields):
    return json.dumps({"version": 1, "arguments": {}, **fields}).encode() + b"\n"


def test_a_question_and_its_answer_are_these_bytes(serve, tmp_path):
    def refuse(_):
        raise BadArgument("index", "give one")

    serve({"partitions": lambda arguments: [arguments["first"]], "refuse": refuse})
    assert talk(tmp_path, b'{"version":1,"call":"partitions","arguments":{"first":3}}\n') == b'{"version":1,"ok":[3]}\n'
    assert talk(tmp_path, b'{"version":1,"call":"refuse"}\n') == (
        b'{"version":1,"error":"BadArgument","why":"index: give one"}\n'
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 60), max_size=8), count=st.integers(1, 4))
def test_lines_come_whole_however_they_are_cut(echo, cuts, count):
    data = b"".join(question(call="echo", arguments={"what": n}) for n in range(count))
    parts = []
    for cut in cuts:
        parts.append(data[:cut])
        data = data[cut:]
    answers = talk(echo, *parts, data).splitlines()
    assert [json.loads(one)["ok"] for one in answers] == list(range(count))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=300))
def test_whatever_comes_is_answered_with_an_error_and_the_server_goes_on(echo, data):
    for line in talk(echo, data).splitlines():
        assert json.loads(line)["error"] in {"BadControlMessage", "UnsupportedVersion"}
    assert ask(echo, "echo", {"what": 1}) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n", b"1\n", b"\xff\n", b"{\n", b"[" * 20_000 + b"\n", b"{}", b"x" * (QUESTION_BYTES_MAX + 1),
        b"x" * QUESTION_BYTES_MAX + b"\n", question(call=1), question(call="echo", arguments=[]),
    ],
    ids=[
        "list", "number", "no UTF-8", "no JSON", "deep", "cut off", "too long", "too long and whole", "no name",
        "no arguments",
    ],
)  # fmt: skip
def test_what_is_no_question_ends_its_connection_and_nobody_elses(echo, line):
    after = question(call="echo", arguments={"what": 2}) if line.endswith(b"\n") else b""
    (answer,) = talk(echo, line + after).splitlines()
    assert json.loads(answer)["error"] == "BadControlMessage"
    assert ask(echo, "echo", {"what": 1}) == 1


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_version_is_refused_by_name(echo, version):
    answer, after = map(json.loads, talk(echo, question(version=version, call="echo"), question(call="?")).splitlines())
    assert (answer["error"], f"version {version}" in answer["why"]) == ("UnsupportedVersion", True)
    assert after["error"] == "UnknownCall", "the connection goes on"


@pytest.mark.parametrize("answer", [b"", b"{}\n", b"[]\n", b'{"version":2,"ok":1}\n', b'{"version":1,"ok":1}'])
def test_what_is_no_answer_is_refused(answer):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(CallRefused) as refused:
            ask_over(ours, "status", {})
    assert refused.value.kind == "BadControlMessage"


# ---- who answers, and where


@pytest.fixture
def serve(tmp_path):
    """serve(calls, directory) starts a server; all are closed at the end."""
    made = []

    def start(calls, directory=tmp_path):
        made.append(ControlServer(directory, lambda _: calls))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def echo(serve, tmp_path):
    """The directory of a server that answers `echo`."""
    serve({"echo": lambda arguments: arguments["what"]})
    return tmp_path


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


def test_so_many_peers_are_served_and_no_more(serve, tmp_path):
    serve({"where": lambda _: "here"})
    peers = []
    try:
        for _ in range(CONNECTIONS_MAX):
            peer = connect_to(tmp_path, WAIT_S)
            peers.append(peer)
            peer.sendall(question(call="where"))
            assert json.loads(peer.recv(4096))["ok"] == "here"
        with pytest.raises((NobodyAnswers, CallRefused)):
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
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the answer"
    let_go.set()
    closing.join(WAIT_S)
    asking.join(WAIT_S)
    assert answers == ["done"]


def calls_under_way():
    return [thread for thread in threading.enumerate() if thread.name == "pushrep-control-call"]


@pytest.mark.parametrize("ends", ["it asks nothing for long", "the server ends"])
def test_a_peer_that_asks_nothing_is_left(serve, tmp_path, monkeypatch, ends):
    if ends == "it asks nothing for long":
        monkeypatch.setattr(control, "_IDLE_S", 0.02)
    server = serve({"where": lambda _: "here"})
    with connect_to(tmp_path, WAIT_S) as peer:
        peer.sendall(question(call="where"))
        assert json.loads(peer.recv(4096))["ok"] == "here"
        if ends == "the server ends":
            server.close()
            assert calls_under_way() == []
        assert peer.recv(1) == b"", "the connection has ended"


def test_the_end_of_a_server_whose_directory_was_moved_leaves_that_of_the_next_one_alone(serve, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    moved = serve({"where": lambda _: "there"}, home)
    home.rename(tmp_path / "elsewhere")
    home.mkdir()
    serve({"where": lambda _: "here"}, home)
    moved.close()
    assert ask(home, "where") == "here"


def test_servers_that_come_and_go_leave_nothing_behind(serve, tmp_path):
    def come_and_go():
        for _ in range(10):
            server = serve({"where": lambda _: "here"}, tmp_path / "one")
            assert ask(tmp_path / "one", "where") == "here"
            server.close()
        return len(os.listdir("/proc/self/fd"))

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    before = come_and_go()
    assert come_and_go() < before + 10, "descriptors stay"
    serve({"where": lambda _: "there"}, tmp_path / "other")  # so that what all share does not end with each
    come_and_go()
    assert ask(tmp_path / "other", "where") == "there"


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
