"""The console in a browser over the real thing: Chromium drives it, axe-core looks at it. Skipped where it is missing.

PUSHREP_SCREENSHOTS=DIRECTORY keeps a picture of every page, light and dark; those of docs/console are made so.
PUSHREP_DEMO=demo-out, what `make demo` left: the picture of the filters is of it.
"""

import json
import os
import shutil
import sys
import threading
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from pushrep import Outbox, OutboxConfig, ReplayClient, ReplayRequest
from pushrep.cli.main import run
from pushrep.outbox.promotion import promote
from pushrep.replay import FOLLOW
from pushrep.startpoints import STORE_NAME, Startpoint, StartpointStore
from pushrep.status.table import size
from tests.fleet import CONSUMER, Fleet
from tests.integration.certificates import make_certificates
from tests.integration.conftest import World
from tests.integration.outboxes import QUICK, SMALL, WAIT_S, wait_until

pytest.importorskip("starlette")
pytest.importorskip("pyspark")
from pushrep.console.access import ConsoleAccess
from pushrep.console.web import look_at_marks
from tests.integration.test_console import LOOPBACK, serve

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser; it is not installed")

CHROMIUM = shutil.which("chromium")
LOOKS = 50
LOOKED_AT_EVERY_S = 0.5  # each time every page that is open asks for all of itself again
MOVING = {"age_ms", "idle_ms", "silent_ms", "last_contact_ms", "disk"}
PICTURES = Path(os.environ["PUSHREP_SCREENSHOTS"]).absolute() if "PUSHREP_SCREENSHOTS" in os.environ else None
DEMO = Path(os.environ["PUSHREP_DEMO"]).absolute() if "PUSHREP_DEMO" in os.environ else None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        sync_api.expect.set_options(timeout=WAIT_S * 1000)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium):
    """Opens a page; what it complains of, and what it asks of others, fails the test."""
    contexts, wrong = [], []

    def look(request):
        if urlsplit(request.url).hostname != "127.0.0.1":
            wrong.append(f"asked {request.url}")

    def is_wrong(told):
        return told.type == "error" and "net::ERR_" not in told.text  # the server has stopped before the page

    def open_tab(url, **settings):
        contexts.append(chromium.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.on("request", look)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda told: wrong.append(told.text) if is_wrong(told) else None)
        page.goto(url)
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def fleet(broker, tmp_path, monkeypatch):
    (tmp_path / "fleet").mkdir()
    monkeypatch.chdir(tmp_path)  # pictures show short paths
    world = World(Path("fleet"))
    try:
        with Fleet(world, broker.bootstrap_servers) as running:
            running.append(20)
            yield running
    finally:
        world.close()


PATHS = {
    "fleet": "/",
    "outbox": "/outbox/orders",
    "records": "/outbox/orders/records?from=18&payloads=shown",
    "node": "/node/node-1",
    "filters": "/filter",
    "startpoints": "/outbox/payments/startpoints",
}


@pytest.mark.java
@pytest.mark.spark
def test_two_outboxes_three_nodes_a_broker_and_a_query(fleet, tab, capfd):
    """Values of every page, who can use it, a startpoint that the query applies, a failover meanwhile."""
    with (
        ReplayClient(str(fleet.world.nodes[1].address)) as client,
        client.replay(ReplayRequest(recording="orders-0", length=FOLLOW)) as replay,
    ):
        records = iter(replay)
        assert [next(records).offset for _ in range(20)] == list(range(20))
        with serve(fleet.world.root, every_s=LOOKED_AT_EVERY_S, marks=[str(fleet.marks)]) as server:
            page = tab(server.url, viewport={"width": 1200, "height": 760})
            every_page_shows_the_values_of_status(server, page, fleet, capfd)
            with busy(fleet.orders) if PICTURES else nullcontext():
                everybody_can_use_it(server, tab)
            a_startpoint_is_shown_and_that_the_query_applied_it(server, page, fleet)
            without_javascript = tab(f"{server.url}/outbox/orders", java_script_enabled=False)
            assert without_javascript.locator("#member-table tbody tr").count() == 3
            assert without_javascript.get_by_role("button", name="Copy").count() == 0
    a_failover_is_seen_while_the_page_is_open(fleet, tab)


@pytest.mark.skipif(DEMO is None, reason="PUSHREP_DEMO names no directory of a demo that ran")
def test_the_filters_page_shows_what_the_demos_filter_dropped(tab, tmp_path, monkeypatch):
    monkeypatch.chdir(DEMO.parent)  # pictures show short paths
    dropped = json.loads((DEMO / "summary.json").read_text(encoding="utf-8"))["dropped"]
    with serve(tmp_path, marks=[f"{DEMO.name}/marks"]) as server:
        for scheme in ("light", "dark"):
            page = tab(f"{server.url}/filter", color_scheme=scheme, viewport={"width": 1200, "height": 760})
            assert page.locator(".batch-table tfoot td").nth(3).inner_text() == f"{dropped:,}"
            if PICTURES:
                keep_pictures(page, f"filters-{scheme}", 1200)


def every_page_shows_the_values_of_status(server, page, fleet, capfd):
    def status():
        capfd.readouterr()
        places = [fleet.world.root / name for name in ("orders", "payments", "node-1", "node-2", "node-3")]
        assert run(["status", *map(str, places), "--partitions", "--json"]) in {0, 1}
        sys.stdout.flush()
        return json.loads(capfd.readouterr().out)["places"]

    def steady(found):
        """The page without values that differ in each reading."""
        if isinstance(found, dict):
            return {name: steady(one) for name, one in found.items() if name not in MOVING}
        return [steady(one) for one in found] if isinstance(found, list) else found

    def told_by_the_marks():
        return look_at_marks(str(fleet.marks))["batches"]

    for name, look, check in (
        ("fleet", status, fleet_page), ("outbox", status, outbox_page), ("node", status, node_page),
        ("filters", told_by_the_marks, filter_page),
    ):  # fmt: skip
        for _ in range(LOOKS):  # until nothing moved while the page was made
            before = look()
            page.goto(server.url + PATHS[name])
            shown, told = check(page, before)
            if shown == told and steady(look()) == steady(before):
                break
        else:
            pytest.fail(f"{name}: no two looks are the same, {shown}, {told}, {before}")
    page.goto(server.url + PATHS["records"])
    log = fleet.orders.log(0)
    assert [(row[0], row[3:]) for row in table(page, "#record-table")] == [
        (str(one.offset), [size(len(one.key)), size(len(one.value)), one.value.decode()]) for one in log.records(18)
    ]


def table(page, selector):
    """The texts of its cells, by row."""
    script = "table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    return page.locator(selector).first.evaluate(script)


def facts(page):
    script = "them => them.map(one => [one.querySelector('dt').innerText, one.querySelector('dd').innerText])"
    return dict(page.locator(".facts div").evaluate_all(script))


def fleet_page(page, places):
    """The shown values, and the expected ones."""
    shown = [[row[0].split()[0], row[1], row[2], row[3]] for row in table(page, "#outbox-table")]
    shown += [row[:1] + row[2:6] for row in table(page, "#node-table")]
    told, pushed = [], {}
    for one in places:
        if one["kind"] == "node":
            continue
        lags = [member["lag"] for member in one["members"] if member["lag"]]
        topic = [str(destination["records"]) for destination in one["destinations"]] or ["-"]
        name = Path(one["place"]).name
        told.append([name, f"● {one['state']}", str(max(lag["records"] for lag in lags)), *topic])
        for member in one["members"]:
            if member["lag"]:
                pushed.setdefault(member["address"], []).append(member)
    for address, members in pushed.items():
        lags = [member["lag"] for member in members]
        in_sync, partitions, records, held = (
            sum(lag[name] for lag in lags) for name in ("in_sync", "partitions", "records", "size_bytes")
        )
        sessions = str(sum(member["sessions"] for member in members))
        told.append([address, f"{in_sync} of {partitions}", sessions, str(records), size(held)])
    return sorted(shown), sorted(told)


def outbox_page(page, places):
    [one] = [place for place in places if place["place"].endswith("/orders")]
    [topic] = one["destinations"]
    named = {
        "Process": one["pid"], "Acknowledged": f"{one['acks']}, {one['durability']}", "Leader epoch": one["epoch"],
        "In sync, at least": f"{one['in_sync_min']} of {len(one['members'])}, min {one['min_insync_replicas']}",
        "End": one["log_end_offsets"], "Flushed": one["flushed_offsets"], "High watermark": one["high_watermarks"],
        f"Topic {topic['topic']}": f"{topic['records']} behind", "Outbox id": one["outbox_id"],
    }  # fmt: skip
    found = facts(page)
    members = [
        [
            str(member["index"]), member["address"] or "here", f"● {'leader' if member['is_leader'] else 'replica'}",
            *(
                [f"{lag['in_sync']} of {lag['partitions']}", str(member["sessions"]), str(lag["records"])]
                if (lag := member["lag"]) else ["-"] * 3
            ),
        ]
        for member in one["members"]
    ]  # fmt: skip
    numbers = ("flushed_offset", "high_watermark", "log_end_offset")
    parts = [
        [str(part["partition"]), "", str(part["log_start_offset"]), str(part["shipped"][topic["name"]])]
        + [str(part[number]) for number in numbers]
        + [", ".join(map(str, part["in_sync"])), str(part["leader_epoch"])]
        for part in one["parts"]
    ]
    shown = [{name: found[name] for name in named}, [row[:6] for row in table(page, "#member-table")]]
    shown.append(table(page, "#partition-table"))
    return shown, [{name: str(value) for name, value in named.items()}, members, parts]


def node_page(page, places):
    [one] = [place for place in places if place["place"].endswith("/node-1")]
    expires_s = one["certificates"].get("node")
    named = {
        "Process": one["pid"], "Connections": one["connections"], "Replica epoch": one["replica_epoch"],
        "Certificate until": f"{datetime.fromtimestamp(expires_s, UTC)}" if expires_s else "none",
        "Replayed": f"{one['replays']['records_sent']} records, {size(one['replays']['bytes_sent'])}",
    }  # fmt: skip
    found = facts(page)
    sessions = [
        [
            f"{session['session_id']:016x}", str(session["recording"]), session["state"], str(session["position"]),
            str(session["lag"]), size(session["credit"]), str(session["records_sent"]),
        ]
        for session in one["replays"]["sessions"]
    ]  # fmt: skip
    numbers = ("log_start_offset", "flushed_offset", "high_watermark", "log_end_offset", "leader_epoch")
    logs = [
        [f"{log['topic']}-{log['partition']}", log["outbox_id"], *(str(log[number]) for number in numbers)]
        for log in one["logs"]
    ]
    shown = [{name: found[name] for name in named}, [row[:7] for row in table(page, "#session-table")]]
    shown.append([row[:7] for row in table(page, "#log-table")])
    return shown, [{name: str(value) for name, value in named.items()}, sessions, logs]


def filter_page(page, batches):
    numbers = ("batch", "read", "rows", "kept", "dropped", "jumped", "unkeyed")
    told = [[str(one.get(name, "unknown")) for name in numbers] for one in batches]
    return sorted(row[:7] for row in table(page, ".batch-table")), sorted(told)


def everybody_can_use_it(server, tab):
    """axe finds nothing, and no page is wider than the window."""
    for scheme, width, rules in (("light", 1200, None), ("dark", 390, ["color-contrast"])):
        page = tab(server.url, color_scheme=scheme, viewport={"width": width, "height": 760})
        for name, path in PATHS.items():
            page.goto(server.url + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            if PICTURES and name != "filters":
                keep_pictures(page, f"{name}-{scheme}", width)
            if rules and name not in {"fleet", "outbox"}:
                continue
            page.evaluate(AXE_SCRIPT)
            found = page.evaluate(
                "rules => axe.run({resultTypes: ['violations'], ...rules && {runOnly: rules}})", rules
            )
            told = [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]]
            assert not told, f"{path}, {scheme}"
        page.close()


@contextmanager
def busy(outbox):
    """For the pictures: a service that has been written to for a minute, at a changing rate."""
    stop = threading.Event()

    def write():
        for number in count():
            if stop.wait(0.05):
                return
            outbox.append_many(number % 2, [b'{"order": %d}' % number] * (5 + number // 100 % 4 * 3)).result(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        stop.wait(60)
        try:
            yield
        finally:
            stop.set()
            writing.result(WAIT_S)


def keep_pictures(page, name, width):
    if width < 1200:
        keep_picture(page, f"{name}-phone")
        page.set_viewport_size({"width": 1200, "height": 760})
    tall = min(1100, page.evaluate("document.documentElement.scrollHeight"))
    page.set_viewport_size({"width": 1200, "height": tall})
    keep_picture(page, name)
    page.set_viewport_size({"width": width, "height": 760})


def keep_picture(page, name):
    """WebP, which playwright itself does not write: a third of a PNG."""
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", {"format": "webp", "quality": 90})
    (PICTURES / f"{name}.webp").write_bytes(b64decode(taken["data"]))


def a_startpoint_is_shown_and_that_the_query_applied_it(server, page, fleet):
    again = sum(one["dropped"] for one in fleet.batches())
    with StartpointStore.open(fleet.world.root / "payments" / STORE_NAME) as store:
        store.write(CONSUMER, "payments", 0, Startpoint.specific(5), "wrote nonsense")
    page.goto(f"{server.url}/outbox/payments/startpoints")
    row = page.locator("#startpoint-table tbody tr")
    sync_api.expect(row).to_contain_text("wrote nonsense")
    wait_until(lambda: page.reload() and "applied" in row.inner_text(), "the query applies it", 0.2)
    wait_until(lambda: sum(one["dropped"] for one in fleet.batches()) == again + 15, "it says what it dropped")


def a_failover_is_seen_while_the_page_is_open(fleet, tab):
    orders, root = fleet.orders, fleet.world.root
    copy = root / "node-1" / orders.identity.outbox_id
    with serve(root, copy, every_s=LOOKED_AT_EVERY_S) as server:
        page = tab(server.url)
        row = page.locator("#outbox-table tr", has_text="orders of billing")
        sync_api.expect(row).to_contain_text("leading")
        page.evaluate("window.isThisPage = true")
        page.locator("#outbox-table").get_by_role("link", name="orders", exact=True).focus()
        orders.close()
        sync_api.expect(row).to_contain_text("closed")
        with fleet.world.nodes[1].hand_over(UUID(orders.identity.outbox_id)) as last_contact:
            promote(copy, push=QUICK, last_contact=last_contact, timeout_s=WAIT_S)
        replicas = [str(fleet.world.nodes[2].address)]
        with Outbox.open(
            copy, "orders", 2, "billing", replicas=replicas, config=OutboxConfig(push=QUICK, log_config=SMALL)
        ):
            promoted = page.locator("#outbox-table tr", has_text=copy.name)
            sync_api.expect(promoted).to_contain_text("leading")
            assert page.evaluate("window.isThisPage"), "it was never loaded anew"
            assert page.evaluate("document.activeElement.textContent") == "orders", "what had the focus keeps it"
        server.close()
        sync_api.expect(page.locator(".stale").first).to_be_visible()


@pytest.fixture
def orders(tmp_path):
    """A closed outbox; the consumer `billing` has committed 30 of its 40 records."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)) as outbox:
        outbox.append_many(0, [b"x"] * 40).result(WAIT_S)
    with StartpointStore.open(outbox.directory / STORE_NAME) as store:
        store.commit(store.claim("billing", "orders", 0), 30)
    return outbox.directory


def test_with_its_password_a_page_updates_itself(orders, tab, tmp_path):
    make_certificates(tmp_path)
    access = ConsoleAccess(listen=LOOPBACK, password=(password := "p" * 22))
    with serve(orders, access=access, certificate=(tmp_path / "node.pem", tmp_path / "node.key")) as server:
        given = {"username": "any", "password": password}
        page = tab(f"{server.url}/outbox/outbox", http_credentials=given, ignore_https_errors=True)
        named = tab(server.url.replace("//", f"//any:{password}@") + "/outbox/outbox", ignore_https_errors=True)
        for one in (page, named):
            one.evaluate("window.isThisPage = true")
        with Outbox.open(orders, "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)):
            for one in (page, named):
                sync_api.expect(one.locator(".state")).to_contain_text("alone")
                assert one.evaluate("window.isThisPage"), "it was never loaded anew"


def test_what_has_the_focus_is_selected_or_scrolled_stays_while_a_page_updates(orders, tab):
    with (
        serve(orders) as server,
        Outbox.open(orders, "orders", 1, "shop", config=OutboxConfig(log_config=SMALL)) as outbox,
    ):
        page = tab(f"{server.url}/outbox/outbox", viewport={"width": 390, "height": 500})
        end = page.locator("#partition-table tbody td").nth(4)
        sync_api.expect(end).to_have_text("40")
        state = """() => [document.activeElement.getAttribute("aria-labelledby"), getSelection().toString(), scrollY,
            document.activeElement.scrollLeft, document.querySelectorAll("#live *").length]"""
        page.evaluate("""() => {
            const table = document.querySelector("#partition-table").parentElement;
            table.focus();
            table.scrollLeft = 70;
            scrollTo(0, 300);
            getSelection().selectAllChildren(document.querySelector("#past"));
        }""")
        before = page.evaluate(state)
        assert before[0] == "partitions"
        assert before[2:4] == [300, 70]
        outbox.append_many(0, [b"x"] * 7).result(WAIT_S)
        sync_api.expect(end).to_have_text("47")
        after = page.evaluate(state)
        assert (after[0], *after[2:4]) == (before[0], *before[2:4])
        assert after[1].startswith("The last"), "its text changes, it stays selected"


UPDATES = """async (rounds) => {
  let seed = 7;
  const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
  const tree = (depth, ids) => {
    const one = document.createElement(["p", "b", "tr", "details"][random(4)]);
    if (random(2) && ids.length) one.id = ids.splice(random(ids.length), 1)[0];
    if (random(2)) one.setAttribute("class", "c" + random(3));
    for (let n = random(5); n > 0 && depth; n--) one.append(random(3) ? tree(depth - 1, ids) : "t" + random(3));
    return one;
  };
  for (let round = 0; round < rounds; round++) {
    const [old, fresh] = [0, 1].map(() => {
      const whole = document.createElement("main");
      whole.append(tree(3, [..."abcdef"]), tree(3, [..."ghijk"]));
      return whole;
    });
    const wanted = fresh.cloneNode(true);
    update(old, fresh);
    if (!old.isEqualNode(wanted)) return `${old.innerHTML} is not ${wanted.innerHTML}`;
  }
  const list = document.createElement("ul");
  list.innerHTML = "<li id=x><details><summary>x</summary>1</details></li><li id=y>y</li>";
  const [x, y] = list.children;
  x.firstChild.open = true;
  const next = document.createElement("ul");
  next.innerHTML = "<li id=z>z</li><li id=y>y</li><li id=x><details><summary>x</summary>2</details></li>";
  update(list, next);
  const found = [...list.children].map((one) => one.id).join("");
  return [found, list.children[1] === y, list.children[2] === x, x.firstChild.open, x.textContent].join();
}"""


def test_an_updated_element_is_like_the_new_one_and_keeps_what_goes_on(orders, tab):
    """Random trees; then a list whose items changed places, one of them opened by its reader."""
    with serve(orders) as server:
        assert tab(server.url).evaluate(UPDATES, 2_000) == "zyx,true,true,true,x2"


def test_live_updates_leave_nothing_behind_in_the_browser(orders, tab, torture):
    """Twenty looks; with `make torture` as many as an hour has."""
    looks = 1800 if torture.is_long else 20
    with serve(orders) as server:
        page = tab(f"{server.url}/outbox/outbox")
        asked = []
        page.on("requestfinished", lambda request: asked.append(request.url))
        session = page.context.new_cdp_session(page)

        def memory_after(number):
            while len(asked) < number:
                page.evaluate("refresh()")
            for some in (*range(len(asked), number, 100), number):
                wait_until(lambda some=some: page.wait_for_timeout(20) or len(asked) >= some, f"{some} looks")
            session.send("HeapProfiler.collectGarbage")
            return session.send("Memory.getDOMCounters")["nodes"], session.send("Runtime.getHeapUsage")["usedSize"]

        nodes, heap = memory_after(5)
        nodes_after, heap_after = memory_after(5 + looks)
        assert nodes_after <= nodes * 1.2
        assert heap_after <= heap + (1 << 20)
