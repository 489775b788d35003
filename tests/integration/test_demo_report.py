"""The demo's report in a browser: nothing is wider than the window, and axe-core finds nothing, light or dark."""

import shutil

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from examples.demo.report import FOOTER, Page, render_report
from tests.unit.test_demo_picture import a_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser; it is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    cards = [
        ("flights", 336_776, "ink"),
        ("replayed", 21_300, "again"),
        ("kept", 336_776, "kept"),
        ("twice", 0, "kill"),
    ]
    kill = ("12.3 s", "producer", "python 123", "resumed 7,000 records behind the end of the log: they entered twice")
    page = Page(
        "Flights", "Every flight once.", True, cards, [kill] * 4, [("appended", "358,076", "40", "1")], FOOTER, 7
    )
    path.write_text(render_report(page, a_run()).page, encoding="utf-8")
    return path


def test_everybody_can_read_it(report):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1400, 390):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                page.goto(report.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                assert page.locator(".panel svg:visible").count() == 1, "the picture for this width"
                page.evaluate(AXE_SCRIPT)
                found = page.evaluate("axe.run({resultTypes: ['violations']})")
                assert not [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]], (width, scheme)
                page.close()
        browser.close()
