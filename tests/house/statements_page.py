"""The tables of docs/internals/statements.md, made of statements.toml: python -m tests.house.statements_page"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "statements.md"
STATEMENTS: dict[str, list[list[str]]] = tomllib.loads(
    Path(__file__).with_name("statements.toml").read_text(encoding="utf-8")
)
"""{heading: rows}: number or name, the statement, then `file: names of its tests`."""
_TESTS = ROOT / "tests"
_FILES = {
    name: path
    for path in sorted(_TESTS.rglob("test_*.py"))
    for name in (path.stem, str(path.relative_to(_TESTS).with_suffix("")))
}


def held_by(row: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield file and name of each test in a row. Raises KeyError for a file that is not there."""
    for told in row[2:]:
        file, _, names = told.partition(": ")
        for name in names.split():
            yield _FILES[file], name


def page(text: str) -> str:
    """The page with the present tables; its other text is its own."""
    for heading, rows in STATEMENTS.items():
        table = ["| | statement | tests |", "|---|---|---|"]
        for row in rows:
            tests = " ".join(f"`{path.relative_to(ROOT)}::{name}`" for path, name in held_by(row))
            table.append(f"| {row[0]} | {row[1]} | {tests} |")
        before, found, after = text.partition(f"\n## {heading}\n")
        assert found, f"the page has no part {heading}"
        made = "\n".join(table) + "\n"
        text = before + found + re.sub(r"(^\|.*\n)+", lambda _, made=made: made, after, count=1, flags=re.MULTILINE)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
