"""`pushrep console` over real sockets: its values are those of `pushrep status`, and what a browser may do with it."""

import http.client
import json
import re
from html import unescape

import pytest

from pushrep import Acks
from pushrep.cli.main import run
from pushrep.push.sockets import Address
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
from pushrep.console.pages import ADVICE
from pushrep.console.watch import PlaceWatch
from pushrep.console.web import ConsoleServer

LOOPBACK = Address("127.0.0.1", 0)


def serve(*places):
    return ConsoleServer(LOOPBACK, PlaceWatch(map(str, places), every_s=0.1), every_s=0.1)


@pytest.fixture
def console(tmp_path):
    with serve(tmp_path) as server:
        yield server


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.address, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def cells(page, table):
    """Texts of a table's cells, by row."""
    body = re.search(rf'id="{table}".*?<tbody>(.*?)</tbody>', page, re.DOTALL)[1]
    rows = [re.split(r"<t[dh][^>]*>", row)[1:] for row in body.split("<tr>")[1:]]
    return [[" ".join(unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in row] for row in rows]


def status_of(capfd, *places):
    capfd.readouterr()
    run(["status", *map(str, places), "--partitions", "--json"])
    return json.loads(capfd.readouterr().out)["places"]


def test_an_outboxs_page_has_the_values_of_its_status(world, capfd):
    world.node(1)
    with open_outbox(world, 1, partitions=3, acks=Acks.LOCAL) as outbox:
        for number in range(7):
            outbox.append(number % 3, b"a").result(WAIT_S)
        wait_for_all(outbox)
        with serve(world.root) as server:
            [status] = status_of(capfd, outbox.directory)
            code, _, page = get(server, "/outbox/outbox")
            assert code == 200
            parts = [
                [part[name] for name in ("log_start_offset", "flushed_offset", "high_watermark", "log_end_offset")]
                for part in status["parts"]
            ]
            assert [[int(row[n]) for n in (2, 4, 5, 6)] for row in cells(page, "partition-table")] == parts
            members = cells(page, "member-table")
            assert [int(row[0]) for row in members] == [one["index"] for one in status["members"]]
            assert members[1][5] == str(status["members"][1]["lag"]["records"]) == "0"
            _, _, fleet = get(server, "/")
            assert status["state"] in cells(fleet, "outbox-table")[0][1]
            assert status["members"][1]["address"] in [row[0] for row in cells(fleet, "node-table")]


def test_what_is_wrong_says_what_status_says_and_what_to_do(tmp_path, capfd):
    nowhere = tmp_path / "nowhere"
    with serve(nowhere) as server:
        [status] = status_of(capfd, nowhere)
        _, _, page = get(server, "/")
        assert status["problems"][0]["why"] in unescape(page)
        assert f"pushrep status {nowhere}" in page


@pytest.mark.parametrize("command", sorted({command for _, command in ADVICE.values()}))
def test_each_command_that_is_advised_is_one(command, capfd):
    words = [word for word in command.split() if not word.startswith("{")]
    assert run([*words[1:], "--help"]) == 0
    shown = capfd.readouterr().out
    assert all(word in shown for word in words if word != "--help")


def test_pages_run_no_inline_script_and_change_nothing(console):
    code, headers, page = get(console, "/")
    assert code == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]* src=\"/static/)|<style| style=|://", page)
    assert get(console, "/", "POST")[0] == 405
    assert get(console, "/outbox/nothing")[0] == 404


def test_another_sites_name_that_points_here_is_refused(console):
    assert get(console, "/", Host=f"localhost:{console.address.port}")[0] == 200
    assert get(console, "/", Host="elsewhere.example")[0] == 421


def test_open_pages_are_told_of_what_is_new(console):
    connection = http.client.HTTPConnection(*console.address, timeout=WAIT_S)
    try:
        connection.request("GET", "/live")
        answer = connection.getresponse()
        while answer.readline().strip() != b"event: news":
            pass
    finally:
        connection.close()


def test_it_listens_where_only_this_machine_reaches_it(capfd):
    assert run(["console", "--listen", "0.0.0.0:0"]) == 2
    assert "tunnel" in capfd.readouterr().err
