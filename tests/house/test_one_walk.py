"""One walk: nothing goes from header to header but pushrep/log/walk.py, over files, and pushrep/records/header.py, over
bytes.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALKS = {"pushrep/log/walk.py", "pushrep/records/header.py"}
READS_A_HEADER = {"parse", "checked_run", "unpack_walked", "length_of_first"}


def loops_over_headers(text):
    """The lines of loops in which a batch's header is read."""
    for loop in ast.walk(ast.parse(text)):
        if isinstance(loop, ast.For | ast.While | ast.ListComp | ast.GeneratorExp):
            for call in ast.walk(loop):
                if isinstance(call, ast.Call) and reads_a_header(call.func):
                    yield call.lineno


def reads_a_header(called):
    if isinstance(called, ast.Attribute):
        is_header = isinstance(called.value, ast.Name) and called.value.id == "BatchHeader"
        return called.attr == "parse" and is_header
    return isinstance(called, ast.Name) and called.id in READS_A_HEADER


def test_no_other_loop_goes_from_header_to_header():
    files = [path for package in ("pushrep", "spark_jobs", "filtering") for path in (ROOT / package).rglob("*.py")]
    found = [
        f"{name}:{line}"
        for path in files
        if (name := path.relative_to(ROOT).as_posix()) not in WALKS
        for line in loops_over_headers(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask scan, scan_headers or split_batches"


def test_a_loop_over_headers_is_seen():
    assert list(loops_over_headers("while at < size:\n    header = BatchHeader.parse(data, at)\n")) == [2]
    assert not list(loops_over_headers("header = BatchHeader.parse(data)\n"))
