"""Random changes of the product's code, and whether a test sees each: `make mutants N=100`.

    map      runs the tests once and notes which of them execute which line, and how long each takes; kept in
             .cache/mutants. A test file that changed since is run again, a line that moved is found by its text
    draw     by seed: a statement of a function, then one change of it: a condition negated, a call left out, 1 more
    try      in a copy of the tree, which is thrown away: the tests that execute the statement, quick ones first, up
             to a limit of seconds. A test that fails is run again without the change: if it fails, too, it says nothing

Of the changes each one is seen by a test, or not seen by the tests that execute it, or no test executes it. Programs
that a test starts count as the test's own, but those that it kills (children/sitecustomize.py). A change may leave
everything that is promised as it is: that is for a reader to judge. What is written to a program's own log is left out.
"""

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import click

from tests.house.children.sitecustomize import NOW, SETTINGS, TREE_OF

ROOT = Path(__file__).parents[2]
TREE = ("benchmarks", "docs", "examples", "filtering", "partitioner", "pushrep", "spark_jobs", "tests")
PACKAGES = ("filtering", "partitioner", "pushrep")
QUICK = "not spark and not java and not slow"
TEST_TIMEOUT_S = 60
"""A change that waits for ever is seen."""
_REPORT = "PUSHREP_MUTANTS_REPORT"
_CHILDREN = "tests/house/children"

SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


# -- what can be changed -----------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Bytes [start, end) of a module become `text`. lines: of the statement without those inside it."""

    path: str
    lines: range
    start: int
    end: int
    text: str
    was: str

    def __str__(self) -> str:
        was, becomes = (" ".join(text.split())[:60] for text in (self.was, self.text))
        return f"{self.path}:{self.lines.start}  {was}  ->  {becomes}"


def statements_of(path: str, source: str) -> list[list[Change]]:
    """The changes of each statement of a function that has any, in the order of the text."""
    text = _Text(source)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in _inside(node):
                not_run = getattr(statement, "annotation", None)
                parts = (one for one in ast.iter_child_nodes(statement) if one is not not_run)
                header = [one for one in parts if not isinstance(one, _BLOCKS)]
                last = max((one.end_lineno or 0 for one in header if isinstance(one, ast.expr)), default=0)
                lines = range(statement.lineno, max(last, statement.lineno) + 1)
                changes = [
                    Change(path, lines, *text.place(at), becomes, text.of(at))
                    for at, becomes in _changes(statement, header, text)
                ]
                if changes:
                    found.append(changes)
    return found


_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _inside(block: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt) and not isinstance(node, _DEFINITIONS):
            yield node
        if isinstance(node, _BLOCKS) and not isinstance(node, _DEFINITIONS):
            yield from _inside(node)


class _Text:
    """A module's text by the places of its nodes; `ast.get_source_segment` splits all of it at each call."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def place(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.stmt | ast.expr), "has a place"
        assert node.end_lineno is not None, "parsed from text"
        assert node.end_col_offset is not None, "parsed from text"
        starts = self._starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.place(node)
        return self._source[start:end].decode()


def _changes(statement: ast.stmt, header: list[ast.AST], source: _Text) -> Iterator[tuple[ast.AST, str]]:
    """Yield (what is replaced, by which text)."""
    if _is_told(statement) or isinstance(statement, ast.Assert):
        return
    match statement:
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield statement, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield statement, "pass"
        case ast.Return(value=value) if value is not None and not _is_constant(value, None):
            yield statement, "return None"
        case ast.Continue():
            yield statement, "break"
        case ast.Break():
            yield statement, "continue"
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant | ast.Compare):
            yield test, f"(not ({source.of(test)}))"
        case _:
            pass
    for node in (inner for one in header for inner in _expressions(one)):
        yield from _other_expressions(node, source)


def _other_expressions(node: ast.AST, source: _Text) -> Iterator[tuple[ast.AST, str]]:
    def text(node: ast.AST) -> str:
        return f"({source.of(node)})"

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in SWAPS:
            yield node, f"({text(left)} {SWAPS[type(operator)]} {text(right)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPS:
            yield node, f"({text(left)} {SWAPS[type(operator)]} {text(right)})"
        case ast.BoolOp(op=operator, values=values):
            yield node, "(" + (" or " if isinstance(operator, ast.And) else " and ").join(map(text, values)) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, text(operand)
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, f"({value + 1})"
        case ast.IfExp(test=test):
            yield test, f"(not {text(test)})"
        case ast.comprehension(ifs=conditions):
            yield from ((condition, f"(not {text(condition)})") for condition in conditions)
        case _:
            pass


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement; of an f-string, which is for a reader, none."""
    if not isinstance(node, ast.JoinedStr):
        yield node
        for inner in ast.iter_child_nodes(node):
            yield from _expressions(inner)


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_told(statement: ast.stmt) -> bool:
    """Whether it is a docstring or a call of the module's own logger."""
    if not isinstance(statement, ast.Expr):
        return False
    call = statement.value
    is_log = isinstance(call, ast.Call) and ast.unparse(call.func).startswith("_LOG.")
    return is_log or isinstance(call, ast.Constant)


def draw(root: Path, packages: Iterable[str], count: int, seed: int) -> list[Change]:
    """So many changes, each of another statement, in random order."""
    found = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")) if (root / package).is_dir() else [root / package]:
            found += statements_of(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    chosen = random.Random(seed)
    return [chosen.choice(changes) for changes in chosen.sample(found, min(count, len(found)))]


# -- which tests execute a line ----------------------------------------------------------------------------------------


class Map:
    """Runs of the tests with coverage, the newest last: each for the test files that no earlier one had run as they
    are now, with the sources as they were then.
    """

    def __init__(self, root: Path, where: Path, packages: Iterable[str]) -> None:
        self.root, self.where, self.packages = root, where, packages

    def _runs(self) -> list[Path]:
        return sorted(self.where.glob("run-*"), key=lambda path: int(path.name.partition("-")[2]))

    def renew(self, files: Iterable[str], expression: str, workers: int) -> None:
        """Run the test files that are new or changed."""
        hashes = {file: sha256((self.root / file).read_bytes()).hexdigest() for file in files}
        known = self._valid()
        missing = [file for file, digest in hashes.items() if known.get((file, digest)) is None]
        if not missing:
            return
        run = self.where / f"run-{len(self._runs())}"
        shutil.rmtree(making := self.where / "making", ignore_errors=True)
        for package in {package.partition("/")[0] for package in self.packages}:
            shutil.copytree(self.root / package, making / package, ignore=shutil.ignore_patterns("__pycache__"))
        settings = making / "coveragerc"
        sources = ", ".join({package.partition("/")[0] for package in self.packages})
        settings.write_text(  # no greenlets: their end under the tracer stops CPython 3.11 for ever
            f"[run]\nsource = {sources}\nconcurrency = thread\nrelative_files = true\n"
            f"data_file = {making / 'data' / 'coverage'}\n"
        )
        click.echo(f"noting which lines {len(missing)} test files execute ...")
        options = [
            "--cov",
            f"--cov-config={settings}",
            "--cov-context=test",
            "--cov-report=",
            "-m",
            expression,
            "--timeout",
            "600",
        ]
        # A process that begins in the place of one that ended would remove what all others noted.
        options += ["-n", str(workers), "--max-worker-restart", "0"] if workers else []
        places = os.pathsep.join(map(str, (self.root / _CHILDREN, self.root)))
        programs = {"PYTHONPATH": places, TREE_OF: str(self.root), SETTINGS: str(settings)}
        report = run_tests(self.root, missing, options, making / "report.json", limit_s=None, **programs)
        (making / "files.json").write_text(json.dumps({file: hashes[file] for file in missing}))
        (making / "durations.json").write_text(json.dumps(report.durations))
        making.rename(run)
        for failed in report.failed:
            click.echo(f"fails as it is, and isn't asked: {failed}")

    def _valid(self) -> dict[tuple[str, str], Path]:
        return {
            (file, digest): run
            for run in self._runs()
            for file, digest in json.loads((run / "files.json").read_text()).items()
        }

    def tests_of(self, change: Change) -> dict[str, float]:
        """The tests that execute the change's statement, with their durations in seconds, quick ones first."""
        from coverage import CoverageData

        now = (self.root / change.path).read_text(encoding="utf-8").splitlines()
        runs = defaultdict(set)
        for (file, digest), run in self._valid().items():
            if (self.root / file).exists() and sha256((self.root / file).read_bytes()).hexdigest() == digest:
                runs[run].add(file)
        found = {}
        for run, files in runs.items():
            then = (run / change.path).read_text(encoding="utf-8").splitlines() if (run / change.path).exists() else []
            lines = set(_lines_then(now, then, change.lines))
            durations = json.loads((run / "durations.json").read_text())
            for path in (run / "data").iterdir():  # several, if the run was interrupted
                data = CoverageData(str(path))
                data.read()
                for line, contexts in data.contexts_by_lineno(change.path).items():
                    for test in {context.rpartition("|")[0] for context in contexts if line in lines}:
                        if test in durations and test.partition("::")[0] in files:
                            found[test] = durations[test]
        return dict(sorted(found.items(), key=lambda one: one[1]))


def _lines_then(now: list[str], then: list[str], lines: range) -> Iterator[int]:
    """The numbers, from 1, that these lines had in the text that was run."""
    if now == then:
        yield from lines
        return
    for block in SequenceMatcher(a=then, b=now, autojunk=False).get_matching_blocks():
        yield from (n - block.b + block.a for n in lines if block.b <= n - 1 < block.b + block.size)


# -- trying a change ---------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """Of a run of pytest. is_whole: it came to its end; is_late: not within its time."""

    durations: dict[str, float]
    failed: list[str]
    is_whole: bool
    is_late: bool
    output: str


def run_tests(
    root: Path, tests: Iterable[str], options: Iterable[str], where: Path, limit_s: float | None, **more: str
) -> Report:
    """Run pytest on these; after `limit_s` it is interrupted. more: of its environment."""
    listed = where.with_suffix(".tests")
    listed.write_text("\n".join(tests), encoding="utf-8")
    where.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", _REPORT: str(where)}
    environment |= more
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", _PLUGIN]
    command += ["--timeout", str(TEST_TIMEOUT_S), *options, f"@{listed}"]
    output, is_late = where.with_suffix(".output"), False
    with output.open("wb") as told:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=told, stderr=told, start_new_session=True)
        try:
            for sign in (signal.SIGINT, signal.SIGKILL):
                try:
                    process.wait(limit_s)
                    break
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, sign)
                    is_late, limit_s = True, 20
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.read_text(encoding="utf-8", errors="replace")
    durations, failed = json.loads(where.read_text()) if where.exists() else ({}, [])
    return Report(durations, failed, process.returncode in {0, 1}, is_late, text)


class Tried(NamedTuple):
    """What became of a change: by: the test that saw it."""

    change: Change
    outcome: str
    by: str = ""


SEEN, NOT_SEEN, NOT_EXECUTED = "seen", "NOT SEEN", "no test executes it"


class Trials:
    """A copy of the tree in a directory of its own, in which one change after the other is tried."""

    def __init__(self, root: Path, copy: Path, limit_s: float) -> None:
        self.root, self.copy, self.limit_s = root, copy / "tree", limit_s
        self.copy.mkdir()
        for name in TREE:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.copy / name)  # times of files, too: compiled modules are valid
        for path in root.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy2(path, self.copy)
            elif path.name in {".venv", ".cache", ".git"}:
                (self.copy / path.name).symlink_to(path)
        self._report = copy / "report.json"

    def attempt(self, change: Change, tests: dict[str, float]) -> Tried:
        chosen, sum_s = [], 0.0
        for test, duration_s in tests.items():
            if chosen and sum_s + duration_s > self.limit_s / 2:  # starting, and a busy machine, take the other half
                break
            chosen.append(test)
            sum_s += duration_s
        while chosen:
            report = self._run(change, chosen)
            if report.is_whole and not report.failed:
                break
            by = report.failed[0] if report.failed else ""
            if not report.failed and report.is_late:
                break
            as_it_is = self._run(None, [by or chosen[0]])
            if as_it_is.is_whole and not as_it_is.failed:
                return Tried(change, SEEN, by or "pytest can't begin")
            if not by:
                raise click.ClickException(f"pytest can't begin without the change either:\n{as_it_is.output[-2000:]}")
            chosen.remove(by)  # it fails without the change
        return Tried(change, NOT_SEEN if tests else NOT_EXECUTED)

    def _run(self, change: Change | None, tests: list[str]) -> Report:
        if change is None:
            return run_tests(self.copy, tests, ["-x"], self._report, self.limit_s)
        path = self.copy / change.path
        source = path.read_bytes()
        path.write_bytes(source[: change.start] + change.text.encode() + source[change.end :])
        try:
            return run_tests(self.copy, tests, ["-x"], self._report, self.limit_s)
        finally:
            shutil.copy2(self.root / change.path, path)


def table(tried: list[Tried]) -> str:
    """A line each, and the sums."""
    lines = [f"{one.outcome:20} {one.change}" + (f"  [{one.by}]" if one.by else "") for one in tried]
    counts = {outcome: sum(one.outcome == outcome for one in tried) for outcome in (SEEN, NOT_SEEN, NOT_EXECUTED)}
    share = 100 * counts[SEEN] // max(len(tried), 1)
    return "\n".join([*lines, f"{', '.join(f'{n} {what}' for what, n in counts.items())}: {share} % seen"])


@click.command()
@click.option("--count", default=100, show_default=True, help="How many changes.")
@click.option("--seed", type=int, help="The same changes again.  [default: a random one, which is printed]")
@click.option(
    "--room",
    "rooms",
    multiple=True,
    help="A package, a room or a module, as a path; again for more.  [default: all but spark_jobs]",
)
@click.option("--tests", "test_paths", multiple=True, help="Files or directories of tests.  [default: all but house]")
@click.option(
    "--expression", default=QUICK, show_default=True, help="pytest's -m: '' runs Spark's and Kafka's tests, too."
)
@click.option("--workers", default=2, show_default=True, help="Processes that make the map.")
@click.option("--limit", "limit_s", default=240.0, show_default=True, help="Seconds for a change.")
@click.option("--draw-only", is_flag=True, help="Print the changes, try none.")
def main(count: int, seed: int | None, rooms: tuple[str, ...], test_paths: tuple[str, ...], expression: str,
         workers: int, limit_s: float, *, draw_only: bool) -> None:  # fmt: skip
    """Draw changes of the product's code by seed and see which of them turn a test red."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started, and its copy, go with it
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    click.echo(f"--seed {seed}")
    changes = draw(ROOT, rooms or PACKAGES, count, seed)
    if draw_only:
        click.echo("\n".join(map(str, changes)))
        return
    executed = Map(ROOT, ROOT / ".cache" / "mutants", rooms or PACKAGES)
    executed.where.mkdir(parents=True, exist_ok=True)
    executed.renew(files_of_tests(ROOT, test_paths), expression, workers)
    tried = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        trials = Trials(ROOT, Path(copy), limit_s)
        for change in changes:
            tried.append(trials.attempt(change, executed.tests_of(change)))
            click.echo(table(tried[-1:]).partition("\n")[0])
    click.echo(table(tried).rpartition("\n")[2])


def files_of_tests(root: Path, paths: Iterable[str]) -> list[str]:
    """Relative to the root."""
    given = [root / path for path in paths] or [
        one for one in sorted((root / "tests").iterdir()) if one.name != "house"
    ]
    found = [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(root)) for file in found if file.name.startswith("test_")]


# -- as a plugin of the pytest that it runs: durations and failures by the test's id, and which test runs now ----------

_PLUGIN = "tests.house.mutants"
_durations: dict[str, float] = defaultdict(float)
_failed: dict[str, None] = {}


def pytest_configure(config) -> None:  # type: ignore[no-untyped-def]
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if SETTINGS in os.environ and runs_tests:
        now = Path(os.environ[SETTINGS]).with_name(f"now-{os.getpid()}")
        now.touch()
        os.environ[NOW] = str(now)


def pytest_runtest_logstart(nodeid) -> None:  # type: ignore[no-untyped-def]
    if NOW in os.environ:
        Path(os.environ[NOW]).write_text(nodeid, encoding="utf-8")


def pytest_runtest_logreport(report) -> None:  # type: ignore[no-untyped-def]
    _durations[report.nodeid] += report.duration
    if report.failed:
        _failed[report.nodeid] = None


def pytest_sessionfinish(session) -> None:  # type: ignore[no-untyped-def]
    if _REPORT in os.environ and not hasattr(session.config, "workerinput"):
        passed = {test: duration for test, duration in _durations.items() if test not in _failed}
        Path(os.environ[_REPORT]).write_text(json.dumps([passed, list(_failed)]), encoding="utf-8")


if __name__ == "__main__":
    main()
