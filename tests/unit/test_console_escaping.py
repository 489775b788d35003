"""Text from outside is escaped on a page: names, records and errors with HTML do not change the page's elements."""

from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from filtering import StreamMetadata
from pushrep.console import pages
from pushrep.console.records import AskedRecords, RecordsPage, ShownPayload, ShownRecord
from pushrep.console.watch import Reading
from pushrep.console.web import environment
from pushrep.status import PROBLEMS

ENVIRONMENT = environment()
LAG = {"in_sync": 1, "partitions": 2, "records": 3, "size_bytes": 4, "age_ms": 5}
OF_ALL = {"here": "/", "title": "t"}


class Elements(HTMLParser):
    """A page's elements with their attributes' names, and where its links and forms lead."""

    def __init__(self, page):
        super().__init__()
        self.found, self.leads = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [name for name, _ in attrs]))
        self.leads += [value for name, value in attrs if name in {"href", "action", "src"}]

    def handle_endtag(self, tag):
        self.found.append(f"/{tag}")

    def handle_comment(self, data):
        self.found.append("a comment")


def problems(word):
    return [
        {"problem": one, "subject": word, "why": word, "blocks": kind.blocks.value, "advice": word, "command": word}
        for one, kind in PROBLEMS.items()
    ]


def outbox_of(word):
    member = {
        "index": 1, "address": word, "is_leader": False, "is_joining": False, "sessions": 1, "trouble": word,
        "last_end_reason": word, "lag": LAG,
    }  # fmt: skip
    part = {
        "partition": 0, "log_start_offset": 0, "flushed_offset": 1, "high_watermark": 1, "log_end_offset": 2,
        "in_sync": [0], "leader_epoch": 1, "shipped": {word: 1},
    }  # fmt: skip
    found = {
        "kind": "outbox", "place": word, "state": word, "directory": word, "topic": word, "producer": word,
        "outbox_id": word, "acks": word, "durability": word, "epoch": 1, "pid": 1, "in_sync_min": 1,
        "min_insync_replicas": 1, "log_end_offsets": 1, "flushed_offsets": 1, "high_watermarks": 1, "members": [member],
        "destinations": [{"topic": word, "records": 1, "trouble": word}], "parts": [part], "problems": problems(word),
        "certificates": {word: 1},
    }  # fmt: skip
    return pages.row_of(Reading(word, found, 0))


def node_of(word):
    session = {
        "session_id": 1, "recording": word, "state": word, "position": 1, "lag": 1, "credit": 1, "records_sent": 1,
        "idle_ms": 1,
    }  # fmt: skip
    log = {
        "topic": word, "partition": 0, "outbox_id": word, "log_start_offset": 0, "flushed_offset": 0,
        "high_watermark": 0, "log_end_offset": 0, "leader_epoch": 0, "failure": word,
    }  # fmt: skip
    found = {
        "kind": "node", "place": word, "state": word, "directory": word, "address": word, "pid": 1, "connections": 1,
        "replica_epoch": 1, "certificates": {"node": 1}, "logs": [log], "problems": problems(word),
        "replays": {
            "sessions": [session], "sessions_max": 1, "records_sent": 1, "bytes_sent": 1, "ended": {word: 1},
            "refused": {word: 1},
        },
        "leaders": [
            {
                "outbox_id": word, "topic": word, "leader": 1, "address": word, "epoch": 1, "is_here": False,
                "silent_ms": 1,
            }
        ],
        "standbys": [{"outbox_id": word, "state": word, "why": word}],
        "refusals": [{"call": word, "code": word, "count": 1}],
        "unauthorised": [{"call": word, "identity": word, "count": 1}],
    }  # fmt: skip
    return pages.row_of(Reading(word, found, 0))


def every_page(word):
    """Each page by its template, with `word` in place of all text from outside."""
    outbox, node = outbox_of(word), node_of(word)
    written = SimpleNamespace(sequence=1, target=word, created_ms=0, author=word, reason=word)
    payload = ShownPayload(word, word, ((word, word),), word)
    record = ShownRecord(0, 0, 1, 1, StreamMetadata(1, 2, 3), (word, word, word), payload)
    pair = {
        "topic": word, "pid": 1, "partition": 0, "offset": 1, "not_seen": 0, "window": 0,
        "destination_partition": None, "advanced_ms": 0,
    }  # fmt: skip
    look = {"place": word, "query": word, "batches": [{"batch": 1, "read": 1}], "marks": [pair]}
    given = {
        "fleet": {"page": pages.fleet([outbox.reading, node.reading], [word]), "at_ms": 0},
        "outbox": {"row": outbox, "parts": pages.partitions_shown(outbox.found, 0, only_behind=False)},
        "node": {"row": node, "first": 0},
        "records": {
            "row": outbox, "asked": AskedRecords(start=word, form=word, payloads=True), "forms": ["text"],
            "page": RecordsPage([record], 0, 9, 1),
        },
        "startpoints": {
            "row": outbox, "why": word, "store": word, "lines": [(written, word, word)], "history": [word],
        },
        "filter": {"looks": [look, {"place": word, "why": word}], "at_ms": 0},
        "error": {"why": word},
    }  # fmt: skip
    for template, values in given.items():
        yield template, ENVIRONMENT.get_template(f"{template}.html").render(OF_ALL | values)


PLAIN = "A-plain-word"
HARMLESS = {template: Elements(page) for template, page in every_page(PLAIN)}
NASTY = (
    "<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "' autofocus onfocus=alert(1) x='", "<!--",
    "javascript:alert(1)", "//elsewhere.example", "{{ 7 * 7 }}", "</title></textarea><svg/onload=alert(1)>", "a?b#c",
    "..", "&lt;b&gt;", "\u202e\x00\u2028",
)  # fmt: skip


@given(st.text(min_size=1) | st.text(alphabet="<>&\"'=/`{}%#?; x", min_size=1))
@example("x" * 100_000)
def test_any_word_in_any_place_is_text(word):
    check(word)


@pytest.mark.parametrize("word", NASTY)
def test_what_would_run_is_text(word):
    check(word)


def check(word):
    for template, page in every_page(word):
        elements = Elements(page)
        assert elements.found == HARMLESS[template].found, template
        for lead, harmless in zip(elements.leads, HARMLESS[template].leads, strict=True):
            assert urlsplit(lead)[:2] == ("", ""), f"{template} leads elsewhere: {lead}"
            assert unquote(urlsplit(lead).path) == urlsplit(harmless).path.replace(PLAIN, word), f"{template}: {lead}"
