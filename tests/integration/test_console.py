"""`pushrep console` over real sockets: its values are those of `pushrep status`, and what a browser may do with it."""

import base64
import gc
import http.client
import json
import re
import socket
import ssl
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from html import unescape
from urllib.parse import quote

import pytest

from filtering import HighwaterMarks, StreamMetadata
from pushrep import Acks, Outbox, OutboxConfig, ReplayClient, ReplayRequest, SegmentLog
from pushrep.cli.main import run
from pushrep.cli.status import look_at
from pushrep.errors import BadArgument
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.records import Record, TimestampType
from pushrep.replay import FOLLOW
from pushrep.replicate.node_status import NodeStatus, is_node_status
from pushrep.replicate.sockets import Address
from pushrep.startpoints import STORE_NAME, Startpoint, StartpointStore
from pushrep.status.table import size
from pushrep.status.text import status_lines
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey, RowCounts
from spark_jobs.file_marks import FileMarks
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import SMALL, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.support.forged import forged_value

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
from pushrep.console import pages, records, watch, web
from pushrep.console.access import Admission, ConsoleAccess, kept_password
from pushrep.console.watch import PlaceWatch, Reading
from pushrep.console.web import ConsoleServer, ConsoleSettings, environment
from pushrep.status import PROBLEMS

LOOPBACK = Address("127.0.0.1", 0)


def serve(*places, every_s=0.1, access=None, **settings):
    watched = PlaceWatch(map(str, places), every_s=every_s)
    access = access or ConsoleAccess(listen=LOOPBACK)
    return ConsoleServer(watched, ConsoleSettings(access=access, **settings))


@pytest.fixture
def console(tmp_path):
    with serve(tmp_path) as server:
        yield server


def get(server, path, method="GET", body=None, tls=None, **headers):
    if tls is None:
        connection = http.client.HTTPConnection(*server.address, timeout=WAIT_S)
    else:
        connection = http.client.HTTPSConnection(*server.address, timeout=WAIT_S, context=tls)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def cells(page, table):
    """Texts of a table's cells, by row."""
    body = re.search(rf'id="{table}".*?<tbody>(.*?)</tbody>', page, re.DOTALL)[1]
    rows = [re.split(r"<t[dh][^>]*>", row)[1:] for row in re.split(r"<tr[^>]*>", body)[1:]]
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
            assert [[int(row[n]) for n in (2, 3, 4, 5)] for row in cells(page, "partition-table")] == parts
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


def test_a_problem_by_any_name_is_shown(tmp_path, monkeypatch):
    words = {
        "problem": "moon",
        "subject": "sky",
        "why": "too full",
        "blocks": "nothing",
        "advice": "wait",
        "command": "w",
    }
    told = {"kind": "node", "state": "running", "problems": [words]}
    monkeypatch.setattr(watch, "look_at", lambda place, *_, **__: [{"place": place, **told}])
    with serve(tmp_path / "node") as server:
        assert "too full" in get(server, "/")[2]


@pytest.mark.parametrize("command", sorted({kind.command for kind in PROBLEMS.values()}))
def test_each_command_that_is_advised_is_one(command, capfd):
    words = re.sub(r"\{\w+\}", "PLACE", command).split()
    assert run([*words[1:], "--help"]) == 0
    shown = capfd.readouterr().out
    assert [word for word in words if word not in shown and not re.match(r"PLACE|HOST|WHY|DSN|--help$", word)] == []


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


def test_an_empty_directory_is_calm_and_what_is_made_in_it_appears(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STEP_S", 0.1)
    with serve(tmp_path) as server:
        page = get(server, "/")[2]
        assert f"{tmp_path}</code> holds no outbox and no node yet" in page
        assert "No outboxes and no nodes yet." in page
        assert 'class="mark' not in page
        with Outbox.open(tmp_path / "outbox", "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)):
            wait_until(lambda: "orders of shop" in get(server, "/")[2], "the new outbox is shown")
        assert "holds no outbox" not in get(server, "/")[2]


def test_a_page_that_is_not_there_says_so_once(console):
    code, _, page = get(console, "/nowhere")
    assert code == 404
    assert "There is no page at /nowhere." in page
    assert "Not Found" not in page


def test_charts_share_one_time_and_have_a_scale_above_their_values():
    past = [watch.Point(at_s, at_s * 100, 0, 5, None) for at_s in (0, 10, 20, 60, 70)]
    rate, _, topic = pages.series_of(past)
    assert pages.past_s(past) == 70
    assert list(rate.points) == [(60, 100), (50, 100), (10, None), (0, 100)], "a reading is missing in between"
    assert len(pages.rates_of([*past, watch.Point(71, 9_000, 0, 5, None)])) == 4, "a second is too short for a rate"
    assert [ago for ago, _ in topic.points] == [70, 60, 50, 10, 0]
    assert (rate.top, topic.top) == (200, 10), "no constant value lies on the border"
    assert pages.Series("", "", [(0, 0)]).top == 1
    assert all(pages.Series("", "", [(0, value)]).top >= value * 1.1 for value in (0.03, 1, 1.9, 4.6, 9.2, 19, 1e9))


def test_a_rate_is_over_ten_seconds_or_more():
    points = [watch.Point(at_s, end, None, None, None) for at_s, end in ((0, 0), (10, 50), (14, 60), (20, 250))]
    assert [pages.rate_of(points[:n]) for n in range(1, 5)] == [None, 5, 60 / 14, 20]
    assert pages.rate_of([points[0]._replace(end=9), points[1]._replace(end=0)]) == 0, "a log began anew"


def test_the_page_of_a_partition_and_the_last_one_beyond_it():
    count, most = 3 * pages.PARTITIONS_A_PAGE, pages.PARTITIONS_A_PAGE
    parts = [{"log_end_offset": n, "high_watermark": n, "flushed_offset": n - n % 2} for n in range(count)]
    behind, found = parts[1::2], {"parts": parts}
    assert pages.partitions_shown(found, most + 1, only_behind=False) == pages.Partitions(
        parts[most : 2 * most], most, count, len(behind), count - 1
    )
    for first, begin in ((-1, 0), (most - 1, 0), (2 * count, len(behind) // most * most)):
        shown = pages.partitions_shown(found, first, only_behind=True)
        assert (shown.first, shown[0]) == (begin, behind[begin : begin + most])
    assert pages.partitions_shown({}, 5, only_behind=True)[1:] == (0, 0, 0, 0)


def test_a_replica_that_acknowledges_nothing_is_behind_while_it_is_still_in_sync():
    lag = {"in_sync": 3, "partitions": 3, "age_ms": 13_000}
    assert pages.severity_of({"lag": lag}) == pages.Severity.WARN
    assert pages.severity_of({"lag": lag | {"age_ms": 0}}) == pages.Severity.FINE
    assert pages.severity_of({"lag": lag | {"age_ms": 0, "in_sync": 2}}) == pages.Severity.WARN


def test_live_updates_leave_nothing_behind_in_the_server(consumed, torture, monkeypatch):
    """A browser that fetches two pages again and again; in the long form as often as in 90 minutes."""
    for name, value in (("STEP_S", 0.01), ("PAST_S", 0.1), ("_REST", 0)):  # an hour of points is full at once
        monkeypatch.setattr(watch, name, value)
    reading, look_at = threading.Lock(), watch.look_at

    def look_unless_memory_is_measured(*place, **options):
        with reading:
            return look_at(*place, **options)

    monkeypatch.setattr(watch, "look_at", look_unless_memory_is_measured)
    with serve(consumed, every_s=0.02) as server:

        def memory_after(looks):
            for _ in range(looks):
                for path in ("/", "/outbox/outbox"):
                    assert get(server, path)[0] == 200
            with reading:  # a look that is on its way holds a window of the log
                gc.collect()
                return tracemalloc.get_traced_memory()[0]

        def least_memory():
            """The lowest of several measurements, because the memory of recent responses is freed later."""
            return min(memory_after(4) for _ in range(4))

        tracemalloc.start()
        try:
            before = least_memory()
            memory_after(torture.count(5, 3000))
            grown = least_memory() - before
        finally:
            tracemalloc.stop()
    assert grown < 128 << 10


def test_n4_memory_of_a_flood_is_given_back(tmp_path, monkeypatch):
    """How much, `python -m benchmarks.flood console` shows."""
    given_back = threading.Event()
    monkeypatch.setattr(web, "_trim", given_back.set)
    monkeypatch.setattr(web, "_GIVES_BACK_S", 0.01)
    with ExitStack() as flood, serve(tmp_path) as server:
        while not given_back.wait(0.001):
            flood.enter_context(socket.create_connection(server.address, WAIT_S))


def test_it_listens_where_only_this_machine_reaches_it(capfd):
    assert run(["console", "--listen", "0.0.0.0:0"]) == 2
    assert "--password-file" in capfd.readouterr().err


def test_places_of_every_kind_and_state_have_their_page(world, tmp_path, capfd):
    """A closed outbox, a node at its address, a node's directory, logs without an outbox."""
    world.node(1)
    node = world.nodes[1]
    with open_outbox(world, 1, partitions=2, acks=Acks.LOCAL) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
    with SegmentLog.open(tmp_path / "alone" / "old-0"):
        pass
    with serve(outbox.directory, node.address, node.directory, tmp_path / "alone") as server:
        for path, place in (("/outbox/outbox", outbox.directory), (f"/node/{node.address}", node.address)):
            [status] = status_of(capfd, place)
            code, _, page = get(server, path)
            assert code == 200
            assert status["state"] in page
        logs = status["logs"]
        shown = [(row[0], *(int(row[n]) for n in (2, 4, 5, 6))) for row in cells(page, "log-table")]
        numbers = ("log_start_offset", "high_watermark", "log_end_offset", "leader_epoch")
        assert shown == [(f"{one['topic']}-{one['partition']}", *(one[n] for n in numbers)) for one in logs]
        assert get(server, f"/node/{node.directory.name}")[0] == 200
        assert "at rest" in cells(get(server, "/")[2], "other-table")[0][1]


def test_n8_a_node_whose_status_is_none_takes_no_page_from_the_others(world, monkeypatch, torture):
    """A member gone bad, or of another version: its status is refused, or each page of it can be shown."""
    world.node(1)
    node = world.nodes[1]
    with open_outbox(world, 1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        (found,) = look_at(str(node.address))
        random, taken = torture.random("statuses"), 0
        for _ in range(torture.count(200, 20_000)):
            said = forged_value(random, found)
            if isinstance(said, dict) and is_node_status(said | {"kind": "node"}):
                row = pages.row_of(Reading("n", said | {"kind": "node", "place": "n", "address": "n"}, 0))
                shown = {
                    "page": pages.fleet([row.reading], []),
                    "at_ms": 0,
                    "row": row,
                    "first": 0,
                    "here": "/",
                    "title": "t",
                }
                assert list(status_lines(row.found, None))
                for template in ("fleet.html", "node.html"):
                    assert environment().get_template(template).render(shown)
                taken += 1
        assert taken, "a text may be any other"
        monkeypatch.setattr(NodeStatus, "as_answer", lambda _: json.dumps(found | {"leaders": "many"}))
        (place,) = look_at(str(node.address))
        assert (place["kind"], "its status is not that of a node" in place["why"]) == ("unknown", True)


def test_a_nodes_page_shows_its_replay_sessions_as_status_does(world, capfd):
    world.node(1)
    node = world.nodes[1]
    with open_outbox(world, 1, acks=Acks.ALL) as outbox, HandoverSocket(node):
        outbox.append_many(0, [b"a", b"b"]).result(WAIT_S)
        with (
            ReplayClient(str(node.address)) as client,
            client.replay(ReplayRequest(recording="orders-0", length=FOLLOW)) as replay,
            serve(node.directory) as server,
        ):
            assert [next(iter(replay)).value, next(iter(replay)).value] == [b"a", b"b"]

            def is_same():
                """Its credit comes back when it likes to."""
                [session] = status_of(capfd, node.directory)[0]["replays"]["sessions"]
                page = get(server, f"/node/{node.directory.name}")[2]
                told = [f"{session['session_id']:016x}", str(session["recording"]), session["state"], "2", "0"]
                return cells(page, "session-table")[0][:6] == [*told, size(session["credit"])]

            wait_until(is_same, "the page shows the session as status does")
            assert not node.calls.refusals(), "a leader that makes its outbox is told that nothing is here yet"
            assert cells(get(server, f"/node/{node.directory.name}")[2], "log-table")[0][0] == "orders-0"


def test_a_credit_that_a_block_went_beyond_has_its_unit():
    assert (size(-190_877), size(-1), size(190_877)) == ("-186.4 KiB", "-1 B", "186.4 KiB")


def test_a_node_that_is_gone_is_still_one_node(world):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[1].stop()
        with serve(world.root) as server:
            page = get(server, "/")[2]
            assert "1 outbox, 1 node." in page
            assert [row[0] for row in cells(page, "node-table")] == [str(world.nodes[1].address)]
            assert 'href="/node/node-1"' in page


VALUES = (b"gr\xc3\xbc\xc3\x9fe <b>", b'{"order": 7}', b"\xff\x00")
SHOWN = {
    "text": ("grüße <b>", '{"order": 7}', "The value is not UTF-8, it is shown as hex. ff 00"),
    "hex": ("67 72 c3 bc c3 9f 65 20 3c 62 3e", "7b 22 6f 72 64 65 72 22 3a 20 37 7d", "ff 00"),
}


@pytest.fixture
def outbox_of_values(tmp_path):
    with Outbox.open(tmp_path / "outbox", "orders", 2, "billing", config=OutboxConfig(log_config=SMALL)) as outbox:
        for value in VALUES:
            outbox.append(1, value, timestamp_ms=1_372_946_400_000).result(WAIT_S)
    return outbox


@pytest.mark.parametrize("form", SHOWN)
def test_a_records_value_is_shown_when_asked_for_in_the_form_asked_for(outbox_of_values, form):
    with serve(outbox_of_values.directory) as server:
        _, _, hidden = get(server, f"/outbox/outbox/records?partition=1&from=0&as={form}")
        assert {len(row) for row in cells(hidden, "record-table")} == {5}
        _, _, page = get(server, f"/outbox/outbox/records?partition=1&from=0&as={form}&payloads=shown")
        rows = cells(page, "record-table")
        assert [row[:2] for row in rows] == [[str(number), "2013-07-04 14:00:00.000"] for number in range(3)]
        assert tuple(row[5] for row in rows) == SHOWN[form]


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        ("ß".encode() * 4_000, "text", "ß" * 4_000),
        (b"a" + "ß".encode() * 100_000, "text", f"a{'ß' * 3_999}… (of 200,001 bytes)"),
        ("\U0001f600".encode() * 4_001, "text", f"{chr(0x1F600) * 4_000}… (of 16,004 bytes)"),
        (b"a" * 17_000 + b"\xff", "text", f"{'a' * 4_000}… (of 17,001 bytes)"),
        (b"a\xc3", "text", "61 c3"),
        (b"\0" * 1_333, "hex", None),
        (b"\0" * 50_000_000, "hex", None),
    ],
)
def test_n5_at_most_4000_characters_are_shown_and_the_rest_is_not_decoded(value, form, shown):
    tracemalloc.start()
    try:
        found = records.payload_of(Record(0, 0, TimestampType.CREATE_TIME, None, value), "header", form).value
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(found) < 4_100
    if shown is None:
        assert found.replace("\n", " ").startswith("00 00 00")
        assert ("of 50,000,000 bytes" in found) == (len(value) > 1_333)
    else:
        assert found == shown


def test_the_20_bytes_are_taken_apart(outbox_of_values):
    key = StreamMetadata(outbox_of_values.pid, 1, 2)
    with serve(outbox_of_values.directory) as server:
        _, _, page = get(server, "/outbox/outbox/records?partition=1&from=2")
        told = cells(page, "record-table")[0][2]
        assert told == f"{key.pid}, 1, 2 {key.pack().hex(' ')}"


def test_a_start_that_is_none_says_so(outbox_of_values):
    with serve(outbox_of_values.directory) as server:
        for start, word in (
            ("99", "holds the offsets [0, 3)"),
            ("tomorrow", "ISO 8601"),
            ("0&partition=7", "orders-7"),
        ):
            code, _, page = get(server, f"/outbox/outbox/records?partition=1&from={start}")
            assert code == 200
            assert word in unescape(page)


def test_names_and_values_that_are_meant_to_break_a_page_do_not(tmp_path):
    """A directory's name, headers without end, values that are deep or huge, offsets that are none."""
    directory = tmp_path / "o?p=1#%2e<i>"
    with Outbox.open(directory, "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)) as outbox:
        headers = [(f"<b>{n}", b"<script>") for n in range(500)]
        for value in (b"[" * 200_000, b'"' + b"x" * 300_000 + b'"'):
            outbox.append(0, value, headers=headers).result(WAIT_S)
    with serve(tmp_path) as server:
        (lead,) = re.findall(r'id="outbox-table".*?href="([^"]+)"', get(server, "/")[2], re.DOTALL)
        assert get(server, lead)[0] == 200
        for form in ("text", "hex"):
            code, _, page = get(server, f"{lead}/records?from=0&as={form}&payloads=shown")
            assert (code, page.count("and 450 more")) == (200, 2)
            assert len(page) < 100_000
            assert "<script>" not in page
        for start in ("9" * 5_000, "9" * 30, "-" * 5_000, "%00", "\u0663", "1e9", "0x1"):
            assert get(server, f"{lead}/records?from={quote(start, safe='%')}&partition={'9' * 5_000}")[0] == 200
        with StartpointStore.open(directory / STORE_NAME) as store:
            store.write("b" * 249, "orders", 0, Startpoint.earliest(), "<script>" * 200, author="<b>")
        assert "<script>" not in get(server, f"{lead}/startpoints")[2]
        for path in ("/static/../web.py", "/static/%2e%2e/web.py", "/outbox/..%2f..%2fetc", "/outbox/%00"):
            assert get(server, path)[0] == 404


@pytest.fixture
def consumed(tmp_path):
    """An outbox with 40 records, of which the consumer `billing` has committed 30."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)) as outbox:
        outbox.append_many(0, [b"x"] * 40).result(WAIT_S)
    with StartpointStore.open(outbox.directory / STORE_NAME) as store:
        store.commit(store.claim("billing", "orders", 0), 30)
    return outbox.directory


STARTPOINTS = "/outbox/outbox/startpoints"


def test_startpoints_are_shown_with_their_state_and_history(consumed):
    with StartpointStore.open(consumed / STORE_NAME) as store:
        store.write("billing", "orders", 0, Startpoint.specific(10), "wrote nonsense", author="ann")
        store.write("billing", "elsewhere", 0, Startpoint.specific(1), "another topic", author="ann")
        with ReplayClient(consumed).subscribe("orders", consumer="billing") as reads:
            assert reads.poll()[0].records[0].offset == 10
        number = store.write("billing", "orders", 0, Startpoint.specific(20), "again", author="ann")
        store.cancel(number, "wrong day", author="bob")
    before = sorted(consumed.rglob("*"))
    with serve(consumed) as server:
        code, _, page = get(server, STARTPOINTS)
        assert code == 200
        rows = cells(page, "startpoint-table")
        assert [(row[1], row[2], row[3], *row[5:]) for row in rows] == [
            ("billing at orders-0", "offset 20", "cancelled", "ann", "again"),
            ("billing at orders-0", "offset 10", "applied", "ann", "wrote nonsense"),
        ]
        assert "by bob: wrong day" in page
        assert "another topic" not in page
    assert sorted(consumed.rglob("*")) == before, "pages write nothing"


@pytest.mark.parametrize("path", ["/", STARTPOINTS, "/outbox/outbox/records", "/filter", "/static/console.js"])
def test_n5_nothing_can_be_posted(consumed, path):
    with serve(consumed) as server:
        assert get(server, path, "POST", "reason=no")[0] == 405


PASSWORD = "a" * 22


@pytest.fixture
def secured(consumed, tmp_path):
    """A console with a password and TLS, and a context that trusts it."""
    make_certificates(tmp_path)
    access = ConsoleAccess(listen=LOOPBACK, password=PASSWORD)
    with serve(consumed, access=access, certificate=(tmp_path / "node.pem", tmp_path / "node.key")) as server:
        yield server, ssl.create_default_context(cafile=tmp_path / "ca.pem")


def basic(password, name="ada"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_n5_with_a_password_no_route_answers_without_it(secured):
    server, trusting = secured
    for path in ("/", STARTPOINTS, "/outbox/outbox/records", "/filter", "/static/console.css", "/nowhere", "//static/"):
        code, headers, _ = get(server, path, tls=trusting)
        assert (code, headers["WWW-Authenticate"].split()[0]) == (401, "Basic")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert get(server, STARTPOINTS, tls=trusting, Authorization=basic(PASSWORD))[0] == 200
    assert get(server, "/", tls=trusting, Authorization=basic(PASSWORD, "bob"))[0] == 200


def test_n5_a_header_that_makes_another_url_changes_nothing(secured):
    """The request's URL is made of Host and path: neither that, nor what a proxy would say, decides."""
    server, trusting = secured
    for host in (
        "127.0.0.1/static/",
        "127.0.0.1/login?",
        "localhost@elsewhere.example",
        "127.0.0.1#",
        "[::1%/login?]",
        "",
    ):
        assert get(server, "/", tls=trusting, Host=host)[0] in {400, 401, 421}
    forwarded = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "localhost", "Forwarded": "for=127.0.0.1"}
    assert get(server, "/", tls=trusting, **forwarded)[0] == 401


def test_n5_wrong_passwords_wait_a_second_sixteen_at_most_and_a_right_one_does_not(secured):
    server, trusting = secured

    def guess(number):
        began_s = time.monotonic()
        code = get(server, "/", tls=trusting, Authorization=basic(f"wrong{number}"))[0]
        return code, time.monotonic() - began_s

    get(server, "/", tls=trusting, Authorization=basic(PASSWORD))  # the place has been read
    with ThreadPoolExecutor(24) as pool:
        guesses = [pool.submit(guess, number) for number in range(24)]
        answered = []
        while not all(one.done() for one in guesses):
            assert get(server, "/static/icon.svg", tls=trusting, Authorization=basic(PASSWORD))[0] == 200
            answered.append(sum(one.done() for one in guesses))
        found = [one.result() for one in guesses]
    assert any(done < 24 for done in answered), "the right one is answered while wrong ones wait"
    assert {code for code, _ in found} == {401, 429}
    assert all(took_s >= 1 for code, took_s in found if code == 401)


@pytest.mark.parametrize("header", ["", "Basic", "Basic !", "Basic YWRh", f"Bearer {PASSWORD}", f"Basic {PASSWORD}"])
def test_a_header_that_is_no_password_is_a_wrong_one(header):
    access = ConsoleAccess(listen=LOOPBACK, password=PASSWORD)
    assert access.check("localhost", header) is (Admission.WRONG_PASSWORD if header else Admission.NO_PASSWORD)
    assert access.check("localhost", basic(PASSWORD)) is Admission.ALLOWED
    assert PASSWORD not in repr(access)


HOSTS = {
    "localhost": (True, True), "127.0.0.1:8090": (True, True), "[::1]:8090": (True, True), "LOCALHOST:1": (True, True),
    "10.0.0.7": (False, True), "[fe80::1]:8090": (False, True), "elsewhere.example": (False, False), "": (False, False),
    "localhost.elsewhere.example": (False, False), "127.0.0.1.elsewhere.example:8090": (False, False),
    "console.example:8090": (False, False), "[::1%25?login]:8090": (False, False),
    "[fe80::1%elsewhere.example]": (False, False),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_n5_only_its_own_host_is_answered(host):
    """By a console on loopback, and by one that other machines reach."""
    local = ConsoleAccess(listen=Address("127.0.0.1", 8090))
    other = ConsoleAccess(listen=Address("0.0.0.0", 8090), password=PASSWORD)
    answers = [one.check(host, basic(PASSWORD)) for one in (local, other)]
    assert answers == [Admission.ALLOWED if is_own else Admission.OTHER_HOST for is_own in HOSTS[host]]
    named = ConsoleAccess(listen=Address("console.example", 8090), password=PASSWORD)
    assert named.check("console.example:8090", basic(PASSWORD)) is Admission.ALLOWED


def test_the_console_makes_its_password_once_and_takes_no_short_one(tmp_path):
    file = tmp_path / "password"
    password, is_new = kept_password(file)
    assert is_new
    assert len(password) >= 22
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_password(file) == (password, False)
    file.write_text("correct horse\n", encoding="utf-8")
    with pytest.raises(BadArgument, match="fewer than 22"):
        kept_password(file)
    with pytest.raises(BadArgument, match="can't be made"):
        kept_password(tmp_path / "nowhere" / "password")
    with pytest.raises(BadArgument, match="can't be read"):
        kept_password(tmp_path)


def test_a_filters_page_shows_the_marks_of_a_query_that_runs(tmp_path):
    marks = HighwaterMarks.from_columns([7, 8], [0, 1], [1041, 3], window=4, bitmaps=[[0b0111], [0b0101]])
    named = [str(tmp_path / "marks"), "nowhere"]
    store = FileMarks(tmp_path / "marks")
    with serve(tmp_path, marks=named) as server:
        for number, counts in enumerate((None, RowCounts(12, 9, 2, 1, 0, 3), None)):
            ranges = (LogRange("orders", 0, number * 10, number * 10 + 10),)
            store.write(BatchMarks("q", number, ranges, {MarksKey("orders"): marks}, counts=counts), keep=2)
        store.drop_from("q", 2)
        store.write(BatchMarks("q", 2, (), {MarksKey("orders"): marks}), keep=3)
        code, _, page = get(server, "/filter")
        assert code == 200
        assert "Query q" in page
        page = page.replace('batch-table"', '" id="batch-table"', 1).replace('mark-table"', '" id="mark-table"', 1)
        assert cells(page, "batch-table") == [
            ["2", "0", *["unknown"] * 5], ["1", "10", "12", "9", "2", "3", "1"],
        ]  # fmt: skip
        foot = cells(page.replace("<tfoot>", '<i id="foot"><tbody>').replace("</tfoot>", "</tbody>"), "foot")
        assert foot == [["These 2", "10", *["unknown"] * 5]], "what one batch does not know, the sum does not"
        assert [row[:5] for row in cells(page, "mark-table")] == [
            ["orders", "7", "0", "1,041", "1 of 4"], ["orders", "8", "1", "3", "1 of 4"],
        ]  # fmt: skip
        assert "nowhere" in page


def test_a_console_without_marks_says_how_to_name_them(console):
    assert "pushrep console --marks" in get(console, "/filter")[2]


def test_an_address_that_is_taken_is_named(console, tmp_path):
    with pytest.raises(BadArgument, match=f"can't listen on {console.address}"):
        serve(tmp_path, access=ConsoleAccess(listen=console.address))
