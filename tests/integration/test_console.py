"""`pushrep console` over real sockets: its values are those of `pushrep status`, and what a browser may do with it."""

import gc
import http.client
import json
import re
import ssl
import threading
import tracemalloc
from html import unescape
from urllib.parse import quote, urlencode

import pytest
from click.testing import CliRunner

from filtering import HighwaterMarks, StreamMetadata
from pushrep import Acks, Outbox, OutboxConfig, ReplayClient, ReplayRequest, SegmentLog
from pushrep.cli.main import run
from pushrep.errors import BadArgument
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replay import FOLLOW
from pushrep.replicate.sockets import Address
from pushrep.startpoints import STORE_NAME, LogConsumer, StartpointStore
from pushrep.status.table import size
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey, RowCounts
from spark_jobs.file_marks import FileMarks
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import SMALL, WAIT_S, open_outbox, wait_for_all, wait_until

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
from starlette.exceptions import HTTPException

from pushrep.console import watch
from pushrep.console.access import ConsoleAccess, hashed, read_passwords
from pushrep.console.command import console as console_command
from pushrep.console.watch import PlaceWatch
from pushrep.console.web import ConsoleServer, ConsoleSettings
from pushrep.status import PROBLEMS

LOOPBACK = Address("127.0.0.1", 0)


def serve(*places, every_s=0.1, **settings):
    watched = PlaceWatch(map(str, places), every_s=every_s)
    return ConsoleServer(LOOPBACK, watched, ConsoleSettings(every_s=every_s, **settings))


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


def test_a_problem_that_only_a_newer_version_knows_is_shown(tmp_path, monkeypatch):
    told = {"kind": "node", "state": "running", "problems": [{"problem": "moon", "why": "too full", "blocks": False}]}
    monkeypatch.setattr(watch, "look_at", lambda place, *_, **__: [{"place": place, **told}])
    with serve(tmp_path / "node") as server:
        assert "too full" in get(server, "/")[2]


@pytest.mark.parametrize("command", sorted({kind.command for kind in PROBLEMS.values()}))
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
    assert headers["Referrer-Policy"] == "same-origin", "else browsers send our own forms with Origin: null"
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


def test_live_updates_leave_nothing_behind_in_the_server(consumed, torture, monkeypatch):
    """A browser that gets an event after each reading, and fetches two pages; in the long form as often as in 90
    minutes.
    """
    for name, value in (("STEP_S", 0.01), ("PAST_S", 0.1), ("_REST", 0)):  # an hour of points is full at once
        monkeypatch.setattr(watch, name, value)
    reading, look_at = threading.Lock(), watch.look_at

    def look_unless_memory_is_measured(*place, **options):
        with reading:
            return look_at(*place, **options)

    monkeypatch.setattr(watch, "look_at", look_unless_memory_is_measured)
    with serve(consumed, every_s=0.02) as server:
        connection = http.client.HTTPConnection(*server.address, timeout=WAIT_S)
        connection.request("GET", "/live")
        events = connection.getresponse()

        def memory_after(looks):
            for _ in range(looks):
                while events.readline().strip() != b"event: news":
                    pass
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
            connection.close()
    assert grown < 128 << 10


def test_it_listens_where_only_this_machine_reaches_it(capfd):
    assert run(["console", "--listen", "0.0.0.0:0"]) == 2
    assert "--passwords" in capfd.readouterr().err


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


VALUES = {"text": b"gr\xc3\xbc\xc3\x9fe <b>", "json": b'{"order": 7}', "avro": b"\x0e", "hex": b"\xff\x00"}
SHOWN = {"text": "grüße <b>", "json": '{ "order": 7 }', "avro": "7", "hex": "ff 00"}


@pytest.fixture
def outbox_of_values(tmp_path):
    with Outbox.open(tmp_path / "outbox", "orders", 2, "billing", config=OutboxConfig(log_config=SMALL)) as outbox:
        for value in VALUES.values():
            outbox.append(1, value, timestamp_ms=1_372_946_400_000).result(WAIT_S)
    return outbox


@pytest.mark.parametrize(("number", "form"), list(enumerate(VALUES)))
def test_a_records_value_is_shown_when_asked_for_in_the_form_asked_for(outbox_of_values, number, form):
    with serve(outbox_of_values.directory, schemas={"orders": "long"}) as server:
        _, _, hidden = get(server, f"/outbox/outbox/records?partition=1&from={number}&as={form}")
        row = cells(hidden, "record-table")[0]
        assert len(row) == 5
        _, _, page = get(server, f"/outbox/outbox/records?partition=1&from={number}&as={form}&payloads=shown")
        row = cells(page, "record-table")[0]
        assert row[:2] == [str(number), "2013-07-04 14:00:00.000"]
        assert row[5] == SHOWN[form]


def test_the_20_bytes_are_taken_apart(outbox_of_values):
    key = StreamMetadata(outbox_of_values.pid, 1, 2)
    with serve(outbox_of_values.directory) as server:
        _, _, page = get(server, "/outbox/outbox/records?partition=1&from=2")
        told = cells(page, "record-table")[0][2]
        assert told == f"{key.pid}, 1, 2 {key.pack().hex(' ')}"


def test_a_value_that_is_not_what_was_asked_for_and_a_start_that_is_none_say_so(outbox_of_values):
    with serve(outbox_of_values.directory) as server:
        _, _, page = get(server, "/outbox/outbox/records?partition=1&from=3&as=json&payloads=shown")
        assert "not json, it is shown as hex" in cells(page, "record-table")[0][5]
        for start, word in (
            ("99", "holds the offsets [0, 4)"),
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
    with serve(tmp_path, operate=True) as server:
        browser = Browser(server)
        (lead,) = re.findall(r'id="outbox-table".*?href="([^"]+)"', browser.get("/")[2], re.DOTALL)
        assert browser.get(lead)[0] == 200
        for form in ("text", "json", "avro", "hex"):
            code, _, page = browser.get(f"{lead}/records?from=0&as={form}&payloads=shown")
            assert (code, page.count("and 450 more")) == (200, 2)
            assert len(page) < 100_000
            assert "<script>" not in page
        for start in ("9" * 5_000, "9" * 30, "-" * 5_000, "%00", "\u0663", "1e9", "0x1"):
            assert browser.get(f"{lead}/records?from={quote(start, safe='%')}&partition={'9' * 5_000}")[0] == 200
        for place in ("9" * 5_000, "9" * 30, "-" + "9" * 30, "-" + "9" * 30 + "d", "9" * 9 + "-01-01", "\u0663"):
            assert browser.get(f"{lead}/startpoints?place={quote(place)}")[0] in {200, 422}
            assert browser.get(f"{lead}/startpoints?place=0&ttl={quote(place)}&partition={quote(place)}")[0] == 422
        browser.get(f"{lead}/startpoints?place=earliest")
        code, headers, _ = browser.post(f"{lead}/startpoints", place="earliest", reason="r" * 50_000)
        assert code in {303, 422}
        code, headers, _ = browser.post(f"{lead}/startpoints", place="earliest", reason="again")
        assert (code, headers["Location"]) == (303, f"{lead}/startpoints")
        assert browser.get(headers["Location"])[0] == 200
        assert browser.post(f"{lead}/startpoints", place="earliest", reason="r" * 100_000)[0] == 413
        for path in ("/static/../web.py", "/static/%2e%2e/web.py", "/outbox/..%2f..%2fetc", "/outbox/%00"):
            assert browser.get(path)[0] == 404


class Browser:
    """Keeps its cookie, and posts forms as a page of the console would."""

    def __init__(self, server, tls=None):
        self.server, self.tls, self.cookie, self.token = server, tls, "", ""

    def get(self, path):
        return self._told(*get(self.server, path, tls=self.tls, Cookie=self.cookie))

    def post(self, path, *, token=None, headers=None, **fields):
        given = {"Cookie": self.cookie, "Origin": self.server.url, "Sec-Fetch-Site": "same-origin"} | (headers or {})
        body = urlencode({"token": self.token if token is None else token, **fields})
        return self._told(*get(self.server, path, "POST", body, self.tls, **given))

    def _told(self, code, headers, page):
        if (cookie := headers["Set-Cookie"]) is not None:
            self.cookie, attributes = cookie.split(";", 1)
            assert {"httponly", "samesite=strict"} <= {one.strip().lower() for one in attributes.split(";")}
        if found := re.search(r'name="token" value="(\w+)"', page):
            self.token = found[1]
        return code, headers, page


@pytest.fixture
def consumed(tmp_path):
    """An outbox with 40 records, of which the consumer `billing` has committed 30."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)) as outbox:
        outbox.append_many(0, [b"x"] * 40).result(WAIT_S)
    with StartpointStore.open(outbox.directory / STORE_NAME) as store:
        store.commit(store.claim("billing", "orders", 0), 30)
    return outbox.directory


FORM = {"consumer": "billing", "partition": "0", "place": "10"}
PAGE = "/outbox/outbox/startpoints"


def test_a_dry_run_says_what_would_be_read_again(consumed):
    with serve(consumed) as server:
        _, _, page = get(server, f"{PAGE}?{urlencode(FORM)}")
        assert "would read 20 offsets again; a replay filter would drop 20 of them as replays" in page
        assert cells(page, "dry-run-table") == [["billing", "0", "0 to 40", "30", "10", "20", "0", ""]]
        _, _, page = get(server, f"{PAGE}?{urlencode(FORM | {'reset_marks': 'yes'})}")
        assert "would read 20 offsets again; a replay filter would drop 0 of them" in page
        code, _, page = get(server, f"{PAGE}?{urlencode(FORM | {'place': 'nowhere'})}")
        assert code == 422
        assert "is not a place to start" in unescape(page)


def test_a_startpoint_is_set_seen_applied_and_another_cancelled(consumed):
    told = []
    with (
        serve(consumed, operate=True, audit=told.append) as server,
        LogConsumer.open(consumed, "orders", "billing") as reads,
    ):
        browser = Browser(server)
        browser.get(f"{PAGE}?{urlencode(FORM)}")
        code, headers, _ = browser.post(PAGE, **FORM, reason="wrote nonsense")
        assert (code, headers["Location"]) == (303, PAGE)
        assert reads.poll()[0].records[0].offset == 10
        _, _, page = browser.get(PAGE)
        [row] = cells(page, "startpoint-table")
        assert row[:4] == ["1", "billing at orders-0", "offset 10", "applied"]
        assert row[6] == "wrote nonsense"
        browser.post(PAGE, **FORM | {"place": "+1"}, reason="again")
        assert browser.post(f"{PAGE}/2/cancel", reason="wrong day")[0] == 303
        assert "by" in re.search(r"2 cancelled +by .*wrong day", unescape(browser.get(PAGE)[2]))[0]
        assert browser.post(f"{PAGE}/2/cancel", reason="twice")[0] == 422
    lines = [json.loads(line) for line in told]
    assert [(one["did"].partition(" of")[0], one["reason"]) for one in lines] == [
        ("set startpoint 1", "wrote nonsense"), ("set startpoint 2", "again"), ("cancelled startpoint 2", "wrong day"),
    ]  # fmt: skip


def test_nothing_is_set_without_operate(consumed):
    with serve(consumed) as server:
        browser = Browser(server)
        browser.get(f"{PAGE}?{urlencode(FORM)}")
        assert browser.post(PAGE, **FORM, reason="no")[0] == 405
        assert browser.post(f"{PAGE}/1/cancel", reason="no")[0] == 404
    assert not StartpointStore.open(consumed / STORE_NAME).history()


FORGED = (
    {"token": ""},
    {"token": "0" * 64},
    {"headers": {"Origin": "https://elsewhere.example"}},
    {"headers": {"Origin": "null"}},
    {"headers": {"Sec-Fetch-Site": "cross-site"}},
    {"headers": {"Cookie": "pushrep=another"}},
)


def test_a_form_of_another_site_is_refused(consumed):
    with serve(consumed, operate=True) as server:
        browser = Browser(server)
        for forged in FORGED:
            browser.get(f"{PAGE}?{urlencode(FORM)}")
            assert browser.post(PAGE, **FORM, reason="no", **forged)[0] == 403
        assert not StartpointStore.open(consumed / STORE_NAME).history()
        browser.get(f"{PAGE}?{urlencode(FORM)}")
        assert browser.post(PAGE, **FORM, reason="yes")[0] == 303


def test_off_loopback_only_who_logs_in_over_tls_sees_pages_and_the_history_names_them(consumed, tmp_path, monkeypatch):
    monkeypatch.setattr("click.prompt", lambda *_, **__: "correct horse")
    shown = CliRunner().invoke(console_command, ["--new-password", "ada"])
    (tmp_path / "passwords").write_text(shown.output, encoding="utf-8")
    make_certificates(tmp_path)
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    told = []
    settings = {
        "operate": True, "audit": told.append, "passwords": read_passwords(tmp_path / "passwords"),
        "certificate": (tmp_path / "node.pem", tmp_path / "node.key"),
    }  # fmt: skip
    with serve(consumed, **settings) as server:
        browser = Browser(server, trusting)
        for path in ("/", PAGE, "/live"):
            code, headers, _ = browser.get(path)
            assert (code, headers["Location"]) == (303, "/login")
        browser.get("/login")
        stranger = browser.cookie
        assert browser.post("/login", name="ada", password="wrong")[0] == 401
        assert browser.post("/login", name="eve", password="correct horse")[0] == 401
        assert browser.post("/login", name="ada", password="correct horse")[0] == 303
        assert browser.cookie != stranger
        assert browser.get(PAGE)[0] == 200
        assert browser.post(PAGE, **FORM, reason="wrote nonsense")[0] == 303
        assert browser.post("/logout")[0] == 303
        assert browser.get("/")[0] == 303
    assert StartpointStore.open(consumed / STORE_NAME).history()[0].author == "ada"
    assert [json.loads(line)["user"] for line in told] == ["ada", "eve", "ada", "ada"]


def test_passwords_are_checked_one_at_a_time_and_others_are_told_so():
    access = ConsoleAccess({"ada": hashed("correct horse")}, pause=list)
    answers, together = [], threading.Barrier(8)

    def guess():
        together.wait(WAIT_S)
        try:
            answers.append(access.login("ada", "wrong"))
        except HTTPException as error:
            answers.append(error.status_code)

    threads = [threading.Thread(target=guess) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None in answers
    assert 429 in answers
    assert access.user(access.login("ada", "correct horse")) == "ada"


def test_behind_a_wrong_password_no_other_is_checked_for_a_while():
    answers = []

    def pause():
        with pytest.raises(HTTPException) as busy:
            access.login("ada", "correct horse")
        answers.append(busy.value.status_code)

    access = ConsoleAccess({"ada": hashed("correct horse")}, pause=pause)
    assert access.login("ada", "wrong") is None
    assert access.login("eve", "correct horse") is None
    assert answers == [429, 429]
    assert access.user(access.login("ada", "correct horse")) == "ada"


@pytest.mark.parametrize("line", ["ada", "ada:secret", "ada:scrypt$1$8$1$AAAA$AAAA", "ada:md5$1$8$1$AAAA$AAAA"])
def test_a_password_file_with_a_line_that_is_none_is_refused(tmp_path, line):
    file = tmp_path / "passwords"
    file.write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(BadArgument, match="line 2"):
        read_passwords(file)


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
            ["2", "0", "-", "-", "-", "-", "-"], ["1", "10", "12", "9", "2", "3", "1"],
        ]  # fmt: skip
        assert [row[:5] for row in cells(page, "mark-table")] == [
            ["orders", "7", "0", "1,041", "1 of 4"], ["orders", "8", "1", "3", "1 of 4"],
        ]  # fmt: skip
        assert "nowhere" in page


def test_a_console_without_marks_says_how_to_name_them(console):
    assert "pushrep console --marks" in get(console, "/filter")[2]
