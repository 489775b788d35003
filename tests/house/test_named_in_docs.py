"""Commands, options and files that the pages name exist: a page outlives what it describes without anybody noticing."""

import re
from pathlib import Path

import click
import pytest

from pushrep.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_COMMAND = re.compile(r"(?<![\w/-])pushrep ([a-z][a-z-]* [^\n`|\"]*)")
_FILE = re.compile(r"`((?:pushrep|filtering|partitioner|spark_jobs|tests|examples|benchmarks)/[\w/.-]+\.[a-z]+)`")


def wrong_in(text):
    """Each command or option of a text that `pushrep` does not have. A word that is no command begins no command."""
    for found in _COMMAND.finditer(text):
        words, command, taken = found[1].split(". ")[0].split(), cli, []
        while words and isinstance(command, click.Group):
            inner = command.get_command(click.Context(command), words[0])
            if inner is None:
                break
            command, taken = inner, [*taken, words.pop(0)]
        if isinstance(command, click.Group):
            if taken and words and words[0].startswith("--") and words[0] != "--help":
                yield " ".join([*taken, words[0]])
            continue
        known = {"--help", *(name for one in command.params for name in [*one.opts, *one.secondary_opts])}
        for word in words:
            if word in {"--", "|", ";", "&"}:
                break
            if (option := re.match(r"--[a-z][a-z-]*", word)) and option[0] not in known:
                yield " ".join([*taken, option[0]])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_what_is_there(path):
    text = path.read_text(encoding="utf-8")
    assert not [*wrong_in(text)]
    assert not [name for name in _FILE.findall(text) if not (ROOT / name).exists()]


def test_a_wrong_option_is_noticed():
    assert [*wrong_in("`pushrep replay DIR LOG --carrier key`, a pushrep log in which")] == ["replay --carrier"]
    assert not [*wrong_in("$ pushrep outbox run data orders --producer a -- sh orders.sh --no-such")]
