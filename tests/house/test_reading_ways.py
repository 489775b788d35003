"""Whatever gives records out of a log, and is public, is one of the ways that a rotten header is sent down."""

import ast
import re
from pathlib import Path

from tests.readers.ways import NO_LOG_IS_READ, WAYS

ROOT = Path(__file__).parents[2]
ROOMS = (
    "pushrep/log", "pushrep/replay", "pushrep/replicate", "pushrep/kafka", "pushrep/startpoints",
    "pushrep/outbox", "spark_jobs/sources",
)  # fmt: skip
RECORDS = {"Record", "RecordBatch", "Replay", "ReplayBatches", "ReplayedBatch", "ReplayedBlock"}
MAKES_THEM = {"pushrep.outbox.batch.PendingBatch.seal"}
ITERATORS = {"__iter__", "__aiter__"}


def words(annotation):
    """Every name in an annotation, in one that is a string, too."""
    return set(re.findall(r"\w+", ast.unparse(annotation)))


def functions(body, prefix):
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body, f"{prefix}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_public = not node.name.startswith("_") or node.name in ITERATORS
            if is_public and node.returns is not None and words(node.returns) & RECORDS | _sent(node):
                yield f"{prefix}.{node.name}"


def _sent(node):
    """A batch as it is shipped: patched, with another base offset and CRC."""
    return {"SentBatch"} if node.name == "next_piece" else set()


def giving_records():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield from functions(ast.parse(path.read_text(encoding="utf-8")).body, module)


def test_every_public_function_that_gives_records_is_sent_down():
    named = {name for way in WAYS for name in way.functions} | NO_LOG_IS_READ | MAKES_THEM
    found = set(giving_records())
    assert found - named == set(), "not in tests/readers/ways.py: a rotten header is not sent down there"
    assert named - found == set(), "named in tests/readers/ways.py, and not there any more"


def test_the_rule_finds_what_it_is_for():
    text = """
class Reader:
    def read_on(self) -> "Iterator[Record] | None": ...
    def _inside(self) -> Record: ...
    def count(self) -> int: ...
class _Hidden:
    def records(self) -> list[Record]: ...
def batches() -> Iterator[tuple[int, RecordBatch]]: ...
"""
    assert list(functions(ast.parse(text).body, "m")) == ["m.Reader.read_on", "m.batches"]
