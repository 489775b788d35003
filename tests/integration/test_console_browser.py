"""The console in a browser: Chromium drives it, axe-core looks at it. Skipped where either is not installed."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlencode
from uuid import UUID

import pytest

from pushrep import Acks, Outbox
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.outbox.promotion import promote
from pushrep.startpoints import STORE_NAME, LogConsumer, StartpointStore
from tests.integration.outboxes import QUICK, SMALL, WAIT_S, open_outbox, wait_for_all, wait_until

pytest.importorskip("starlette")
from tests.integration.test_console import PAGE, WISH, serve

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser; it is not installed")

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[1] / "vendor" / "axe-4.14.1.min.js"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium):
    """Opens a page; what it complains of, and what it asks of others, fails the test."""
    contexts, wrong = [], []

    def look(request):
        if not request.url.startswith("http://127.0.0.1:"):
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
def leading(world):
    """An outbox that leads with two nodes, each of which answers for its directory."""
    for index in (1, 2):
        world.node(index)
    with (
        open_outbox(world, 1, 2, partitions=2, acks=Acks.ALL) as outbox,
        HandoverSocket(world.nodes[1]),
        HandoverSocket(world.nodes[2]),
    ):
        outbox.append_many(0, [b'{"order": 7}'] * 20).result(WAIT_S)
        wait_for_all(outbox)
        yield outbox


def test_every_page_can_be_used_by_everybody_light_and_dark_wide_and_narrow(leading, world, tab):
    """axe finds nothing, and no page is wider than the window."""
    paths = ["/", "/outbox/outbox", "/outbox/outbox/records?from=0&payloads=shown", "/node/node-1", "/filter"]
    paths += [f"{PAGE}?{urlencode(WISH)}"]
    axe = AXE.read_text(encoding="utf-8")
    with serve(world.root, operate=True) as server:
        for scheme, width, rules in (("light", 1200, None), ("dark", 390, ["color-contrast"])):
            page = tab(server.url, color_scheme=scheme, viewport={"width": width, "height": 760})
            for path in paths:
                page.goto(server.url + path)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                if rules and path not in {paths[0], paths[-1]}:
                    continue
                page.evaluate(axe)
                found = page.evaluate(
                    "rules => axe.run({resultTypes: ['violations'], ...rules && {runOnly: rules}})", rules
                )
                told = [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]]
                assert not told, f"{path}, {scheme}"


def test_a_page_is_whole_without_javascript(leading, world, tab):
    with serve(world.root) as server:
        page = tab(f"{server.url}/outbox/outbox", java_script_enabled=False)
        assert page.locator("#member-table tbody tr").count() == 3
        assert page.get_by_role("button", name="Copy").count() == 0


def test_a_failover_is_seen_while_the_page_is_open(world, tab):
    for index in (1, 2):
        world.node(index)
    with ExitStack() as opened:
        outbox = opened.enter_context(open_outbox(world, 1, 2, acks=Acks.ALL))
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        copy = world.root / "node-1" / outbox.identity.outbox_id
        server = opened.enter_context(serve(outbox.directory, copy))
        page = tab(server.url)
        row = page.locator("#outbox-table tr", has_text="orders of billing")
        sync_api.expect(row).to_contain_text("leading")
        page.evaluate("window.isThisPage = true")
        page.locator("#outbox-table").get_by_role("link", name="outbox", exact=True).focus()
        outbox.close()
        sync_api.expect(row).to_contain_text("closed")
        with world.nodes[1].hand_over(UUID(outbox.identity.outbox_id)) as last_contact:
            promote(copy, push=QUICK, last_contact=last_contact, timeout_s=WAIT_S)
        replicas = [str(world.nodes[2].address)]
        with Outbox.open(copy, "orders", 1, "billing", replicas=replicas, push=QUICK, log_config=SMALL):
            promoted = page.locator("#outbox-table tr", has_text=copy.name)
            sync_api.expect(promoted).to_contain_text("leading")
            assert page.evaluate("window.isThisPage"), "it was never loaded anew"
            assert page.evaluate("document.activeElement.textContent") == "outbox", "what had the focus keeps it"
        server.stop()
        sync_api.expect(page.locator(".stale").first).to_be_visible()


@pytest.fixture
def orders(tmp_path):
    """A closed outbox; the consumer `billing` has committed 30 of its 40 records."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "shop", log_config=SMALL) as outbox:
        outbox.append_many(0, [b"x"] * 40).result(WAIT_S)
    with StartpointStore.open(outbox.directory / STORE_NAME) as store:
        store.commit(store.claim("billing", "orders", 0), 30)
    return outbox.directory


def test_a_startpoint_is_set_by_hand_and_seen_applied(orders, tab):
    with serve(orders, operate=True) as server, LogConsumer.open(orders, "orders", "billing") as consumer:
        page = tab(server.url + PAGE)
        page.get_by_label("Consumer").fill("billing")
        page.get_by_label("Start at").fill("10")
        page.get_by_role("button", name="Dry run").click()
        sync_api.expect(page.locator(".dry-run")).to_contain_text("would read 20 again")
        page.get_by_label("Reason, kept as history").fill("wrote nonsense")
        page.get_by_role("button", name="Set this startpoint").click()
        row = page.locator("#startpoint-table tbody tr")
        sync_api.expect(row).to_contain_text("pending")
        assert consumer.poll()[0].records[0].offset == 10
        page.reload()
        sync_api.expect(row).to_contain_text("applied")


def test_without_operate_there_is_nothing_to_press(orders, tab):
    with serve(orders) as server:
        page = tab(f"{server.url}{PAGE}?{urlencode(WISH)}")
        sync_api.expect(page.locator(".dry-run")).to_contain_text("would read 20 again")
        assert page.locator("form[method=post]").count() == 0


def test_a_form_that_another_site_posts_is_refused(orders, chromium):
    with serve(orders, operate=True) as server:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(f"{server.url}{PAGE}?{urlencode(WISH)}")
        token = page.locator("input[name=token]").first.get_attribute("value")
        fields = WISH | {"reason": "forged", "token": token}
        inputs = "".join(f'<input name="{name}" value="{value}">' for name, value in fields.items())
        forged = f'<form method="post" action="{server.url}{PAGE}">{inputs}<button>Go</button></form>'
        page.route("http://elsewhere.example/", lambda route: route.fulfill(body=forged, content_type="text/html"))
        page.goto("http://elsewhere.example/")
        with page.expect_navigation() as answered:
            page.get_by_role("button", name="Go").click()
        assert answered.value.status == 403
        context.close()
    assert not StartpointStore.open(orders / STORE_NAME).history()


def test_live_updates_leave_nothing_behind_in_the_browser(orders, tab, torture):
    """Twenty looks; with `make torture` as many as an hour has."""
    looks = 1800 if torture.is_long else 20
    with serve(orders) as server:
        page = tab(f"{server.url}/outbox/outbox")
        asked = []
        page.on("requestfinished", lambda request: asked.append(request.url))
        session = page.context.new_cdp_session(page)

        def memory_after(number):
            page.wait_for_timeout(1)  # lets the events in that are counted
            wait_until(lambda: page.wait_for_timeout(20) or len(asked) >= number, f"{number} looks")
            session.send("HeapProfiler.collectGarbage")
            return session.send("Memory.getDOMCounters")["nodes"], session.send("Runtime.getHeapUsage")["usedSize"]

        nodes, heap = memory_after(5)
        nodes_after, heap_after = memory_after(5 + looks)
        assert nodes_after <= nodes * 1.2
        assert heap_after <= heap + (1 << 20)
