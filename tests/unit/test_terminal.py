"""What others wrote reaches a terminal escaped, whichever command prints it: values, names, reasons, errors."""

import json
import logging
import sys

import click
import pytest

from pushrep import Outbox
from pushrep.cli import main as cli_main
from pushrep.cli.common import TEXT, show_rows
from pushrep.cli.progress import progress
from pushrep.cli.status import look_at
from pushrep.env.checked_json import journal_line
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.settings import printable_text
from pushrep.startpoints import Startpoint, StartpointStore
from pushrep.startpoints.model import Cancelled, Target, Written, to_json
from pushrep.status.table import table
from pushrep.status.terminal import LogLines, Styled, printable, say
from pushrep.status.text import status_lines

# ESC, BEL, a C1 control, newlines of three kinds, a bidirectional override, a half of a surrogate pair, no-break space.
BAD = {
    "\x1b]0;title\x07": r"\x1b]0;title\x07", "\x9b2J": r"\x9b2J", "a\nerror: b": r"a\nerror: b", "a\xa0b": r"a\xa0b",
    "a\r\x85b": r"a\r\x85b", "a\u2028b": r"a\u2028b", "\u202egnp.exe": r"\u202egnp.exe", "\ud800": r"\ud800",
    "\x7f": r"\x7f",
}  # fmt: skip
WRITABLE = [word for word in BAD if word != "\ud800"]  # UTF-8 carries the others


@pytest.fixture
def run(capsys):
    """The lines that `pushrep ...` printed, on both streams; each of them is printable."""

    def command(*arguments):
        capsys.readouterr()
        cli_main.run(list(map(str, arguments)))
        said = capsys.readouterr()
        lines = (said.out + said.err).removesuffix("\n").split("\n")
        assert all(line.isprintable() for line in lines), f"pushrep {arguments[0]} printed {lines!r}"
        return lines

    return command


@pytest.mark.parametrize("word", BAD)
def test_what_is_not_printable_is_escaped_and_the_rest_stays(word):
    assert printable(f"ä {word}\\") == f"ä {BAD[word]}\\"
    assert printable(printable(word)) == printable(word)
    assert printable("ä\\ 'b' 🙂") == "ä\\ 'b' 🙂"


def test_a_style_is_ours_and_only_a_terminal_gets_it(capsys, monkeypatch):
    say(Styled("a\x1b[0m", fg="red"), "b", err=True)
    assert capsys.readouterr().err == "a\\x1b[0m\nb\n"
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    say(Styled("a\x1b[0m", fg="red"))
    assert capsys.readouterr().out == click.style("a\\x1b[0m", fg="red") + "\n"


@pytest.mark.parametrize("limit", [None, 40])
def test_a_table_s_cell_is_in_its_row(limit):
    rows = [[word, "x", word] for word in BAD]
    lines = list(table(["a", "b", "c"], rows, limit))
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 1 + len(rows)


@pytest.mark.parametrize("word", WRITABLE)
def test_n7_a_startpoint_s_reason_and_author_write_no_line(run, tmp_path, word):
    """Whoever may set one could write lines of his own into the history; a file may hold what the door refuses now."""
    store = StartpointStore.open(tmp_path / "startpoints")
    store.write("billing", "orders", 0, Startpoint.specific(10), "wrote nonsense", author="ann")
    facts = [
        Written(
            sequence=2, target=Target("billing", "orders", 0), startpoint=Startpoint.earliest(), author=word,
            reason=word, created_ms=0, ttl_s=None,
        ),
        Cancelled(sequence=2, at_ms=0, author=word, reason=word),
    ]  # fmt: skip
    with (tmp_path / "startpoints" / "startpoints.journal").open("ab") as journal:
        journal.write(b"".join(journal_line([to_json(fact)]) for fact in facts))
    assert len(run("startpoint", "history", tmp_path)) == 3
    assert len(run("startpoint", "list", tmp_path, "--all")) == 3
    assert f"by {BAD[word]}: {BAD[word]}" in run("startpoint", "show", tmp_path, 2)[1]
    (said,) = map(json.loads, run("startpoint", "show", tmp_path, 2, "--json"))
    assert (said["author"], said["reason"]) == (word, word), "JSON escapes, and means the same"


@pytest.mark.parametrize("word", WRITABLE)
def test_n7_a_record_s_value_key_and_headers_write_no_line(run, tmp_path, word, monkeypatch):
    data = word.encode()
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([data, b"\x9b\xff"], keys=[data, data], headers=[[(word, data)], []])
    assert len(run("log", "dump", tmp_path, "orders-0", "--records")) == 5
    assert len(run("replay", tmp_path, "orders-0", "--format", "table")) == 3
    rows = list(map(json.loads, run("replay", tmp_path, "orders-0")))
    assert rows[0]["value"] == rows[0]["headers"][0]["name"] == word, "JSON escapes, and means the same"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("replay", tmp_path, "orders-0", "--format", "raw") == [BAD[word], r"\x9b\xff"]


def test_to_a_pipe_raw_values_are_as_they_were_written(tmp_path, capfdbinary):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"\x1b[2J\xff"])
    assert cli_main.run(["replay", str(tmp_path), "orders-0", "--format", "raw"]) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == b"\x1b[2J\xff\n"


def with_word(value, word):
    """A status with the word in place of each text that is not one of our own words."""
    if isinstance(value, dict):
        ours = {"kind", "blocks", "problem", "level"}
        return {name: one if name in ours else with_word(one, word) for name, one in value.items()}
    if isinstance(value, list):
        return [with_word(one, word) for one in value]
    return word if isinstance(value, str) else value


@pytest.mark.parametrize("limit", [None, 60])
def test_n7_a_status_of_others_words_is_printable(tmp_path, limit):
    with Outbox.open(tmp_path / "a", topic="orders", partitions=2, producer="billing") as outbox:
        outbox.append(0, b"x").result(10)
        (found,) = look_at(str(tmp_path / "a"), with_partitions=True)
    found["problems"] = [
        {
            "problem": "damaged",
            "subject": "",
            "why": "",
            "blocks": "appends",
            "advice": "",
            "command": "",
            "since_ms": 0,
        }
    ]
    plain = len(list(status_lines(with_word(found, "word"), None)))
    for word in BAD:
        lines = list(map(printable, status_lines(with_word(found, word), limit)))
        assert limit is not None or len(lines) == plain, f"{word!r} writes a line"
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("word", WRITABLE)
def test_n7_an_error_and_a_wrong_use_are_one_printable_line_each(run, tmp_path, word):
    assert len(run("startpoint", "show", tmp_path / word.replace("/", ""), "1")) <= 4
    assert run("status", "--no-such", word)[-1].startswith("Error: ")
    assert len(run("replay", tmp_path, "orders-0", "--from", word)) == 1


def test_what_the_log_says_of_others_words_is_one_line_and_so_is_each_line_of_a_traceback():
    record = logging.LogRecord(
        "pushrep.a", logging.ERROR, __file__, 1, "peer %s", ("a\nERROR pushrep.b: c\x1b[2J",), None
    )
    assert "\n" not in LogLines(TEXT).format(record)
    try:
        int("\x1b[2J\n")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert all(line.isprintable() for line in LogLines(TEXT).format(record).split("\n"))


def test_a_list_is_printed_as_json_as_it_is_found(capsys):
    """A directory of thousands of logs is summarised for minutes."""

    def found():
        yield 1
        assert capsys.readouterr().out == '"of 1"\n'
        yield 2

    show_rows(found(), ("number",), lambda one: [str(one)], "of {}".format, as_json=True)
    assert capsys.readouterr().out == '"of 2"\n'


def test_a_note_beside_a_bar_is_no_markup_and_printable(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with progress("a\x9b[b]", 10, unit="records") as show:
        show(5, note="[red]broken\x9b\x07[/]")
    said = capsys.readouterr().err
    assert r"[red]broken\x9b\x07[/]" in said
    assert r"a\x9b[b]" in said


@pytest.mark.parametrize("word", BAD)
def test_n7_names_and_reasons_with_such_characters_are_refused(tmp_path, word):
    store = StartpointStore.open(tmp_path / "startpoints")
    with pytest.raises(BadArgument, match="reason"):
        store.write("billing", "orders", 0, Startpoint.earliest(), word)
    with pytest.raises(BadArgument, match="author"):
        store.write("billing", "orders", 0, Startpoint.earliest(), "why", author=word)
    with pytest.raises(BadArgument, match="consumer"):
        store.write(word, "orders", 0, Startpoint.earliest(), "why")
    with pytest.raises(BadArgument, match="producer"):
        Outbox.open(tmp_path / "outbox", topic="orders", partitions=1, producer=word)
    with pytest.raises(BadArgument, match="reason") as refused:
        printable_text("reason", word)
    assert str(refused.value).isprintable()
