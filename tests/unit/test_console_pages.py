"""What the console's pages compute from readings: the lines of charts, and the commands for a place."""

import threading

import pytest

pytest.importorskip("starlette")

import click
import httpx2

from filtering import StreamMetadata
from pushrep.cli import main
from pushrep.cli.record_rows import time_text
from pushrep.console import command, pages
from pushrep.console.records import RECORDS_A_PAGE, AskedRecords, records_page
from pushrep.console.web import environment
from pushrep.log import SegmentLog
from pushrep.outbox import Outbox


@pytest.mark.parametrize(
    ("points", "path"),
    [
        ([], ""),
        ([(0, None)], ""),
        ([(0, 0)], "M90.0 20.0h.1"),
        ([(20, 0), (10, 8), (0, 4)], "M0.0 20.0h.1L45.0 4.0L90.0 12.0"),
        ([(20, 8), (10, None), (0, 8)], "M0.0 4.0h.1M90.0 4.0h.1"),
        ([(20, None), (10, 8), (0, 0)], "M45.0 4.0h.1L90.0 20.0"),
    ],
)
def test_a_sparkline_is_drawn_from_0_to_a_quarter_above_the_highest(points, path):
    assert f'<path d="{path}"/>' in pages.sparkline(points)


@pytest.mark.parametrize(
    ("points", "path"),
    [
        ([], ""),
        ([(0, 10)], "M640.0 0.0h.1"),
        ([(30, 0), (15, 5), (0, 10)], "M160.0 120.0h.1L400.0 60.0L640.0 0.0"),
    ],
)
def test_a_chart_is_drawn_over_its_whole_time_and_up_to_its_top(points, path):
    assert f'<path class=line d="{path}"/>' in pages.chart(points, 40, 10)


def outbox(**more):
    return {"kind": "outbox", "place": "a b", "topic": "t", "pid": None, "destinations": [], **more}


LEFT = [{"records": 0}, {"records": 7}]


@pytest.mark.parametrize(
    ("found", "commands"),
    [
        (outbox(pid=7, directory="a b"), ["status 'a b'", "replay 'a b' t --from latest", "log ls 'a b'"]),
        (outbox(destinations=LEFT[:1]), ["status 'a b'", "replay 'a b' t --from latest"]),
        (outbox(destinations=LEFT, pid=7), ["status 'a b'", "replay 'a b' t --from latest"]),
        (
            outbox(destinations=LEFT),
            ["status 'a b'", "replay 'a b' t --from latest", "ship 'a b' --bootstrap-servers HOST:PORT"],
        ),
        ({"kind": "node", "place": "a:1"}, ["status a:1"]),
        ({"kind": "logs", "place": "a"}, ["status a", "log ls a"]),
    ],
)
def test_the_commands_of_a_place_are_those_that_it_takes(found, commands):
    assert [command for _, command in pages.commands_for(found)] == [f"pushrep {one}" for one in commands]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 5),
        ("latest", 60 - RECORDS_A_PAGE),
        ("17", 17),
        ("60", None),
        ("2023-11-14T22:13:20.041Z", 41),
        ("2024-01-01", None),
        ("max-timestamp", 50),
    ],
)
def test_a_page_of_records_begins_where_it_was_asked_to(tmp_path, start, first):
    with SegmentLog.open(tmp_path / "t-0") as log:
        for at in range(60):
            log.append(b"%d" % at, timestamps_ms=1_700_000_000_000 + min(at, 50))
        log.flush()
        log.delete_records(5)
    page = records_page(tmp_path, "t", AskedRecords(start=start, payloads=True))
    assert (page.first, page.last) == (5, 60)
    offsets = [one.offset for one in page.records]
    assert offsets == ([] if first is None else list(range(first, min(60, first + RECORDS_A_PAGE))))
    assert page.next == (60 if first is None else first + len(offsets))
    assert [one.payload.value for one in page.records] == list(map(str, offsets))


@pytest.mark.parametrize("start", ["4", "61"])
def test_a_page_outside_of_the_log_is_refused(tmp_path, start):
    with SegmentLog.open(tmp_path / "t-0") as log:
        log.append([b""] * 60)
        log.flush()
        log.delete_records(5)
    with pytest.raises(click.ClickException, match=r"the log holds the offsets \[5, 60\)"):
        records_page(tmp_path, "t", AskedRecords(start=start))


def test_a_record_shows_its_source_from_its_key_or_its_header(tmp_path):
    for carrier in ("key", "header"):
        with Outbox.open(tmp_path / carrier, "t", 1, "shop", carrier=carrier) as outbox:
            outbox.append(0, b"a", metadata=StreamMetadata(7, 0, 5)).result()
            outbox.append(0, b"b").result()
        shown = records_page(tmp_path / carrier, "t", AskedRecords(payloads=True)).records
        assert shown[0].metadata == StreamMetadata(7, 0, 5)
        assert (shown[0].payload.key, shown[0].payload.headers) == ("" if carrier == "key" else "null", ())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 seconds"), (48, "48 seconds"), (720, "12 minutes"), (3500 - 1, "58 minutes"), (3500, "hour")],
)
def test_the_time_of_a_chart_is_told_in_words(seconds, words):
    assert environment().from_string("{{ seconds | span }}").render(seconds=seconds) == words


@pytest.mark.parametrize(("time_ms", "words"), [(1, "1970-01-01 00:00:00.001"), (1 << 62, str(1 << 62))])
def test_a_time_beyond_the_calendar_is_told_as_its_number(time_ms, words):
    assert time_text(time_ms) == words


def test_the_command_says_where_it_listens_and_shows_what_is_here(tmp_path, monkeypatch, capsys):
    with Outbox.open(tmp_path / "outbox", "orders", 1, "shop"):
        pass
    fetched = []

    class Once(threading.Event):
        def wait(self, timeout=None):
            said = capsys.readouterr()
            url = said.out.removeprefix("listening on ").strip()
            password = (tmp_path / "password").read_text().strip()
            with httpx2.Client(auth=("any", password)) as client:
                fetched.append((client.get(url).text, said.err))
            return True

    monkeypatch.setattr(command, "stopped_by_signal", Once)
    monkeypatch.chdir(tmp_path)
    for said in (["password has the console's password; any name goes with it\n"], []):
        assert main.run(["console", "--listen", "127.0.0.1:0", "--password-file", "password"]) == 0
        page, errors = fetched.pop()
        assert "orders of shop" in page, "without an argument it shows the working directory"
        assert errors == "".join(said), "a password is told of when it is new"


def test_a_certificate_goes_with_its_key(capsys, monkeypatch):
    monkeypatch.setattr(command, "stopped_by_signal", lambda: pytest.fail("it listens"))
    assert main.run(["console", "--listen-cert", "web.pem"]) == 2
    assert "give both --listen-cert and --listen-key, or neither" in capsys.readouterr().err
