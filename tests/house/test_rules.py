"""House rules that no linter checks: which text tracked files may contain, and which docstring each package needs."""

import ast
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.scopes import SCOPES

ROOT = Path(__file__).parents[2]
PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
IMPURE = {"asyncio", "os", "socket", "time"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

_MACHINE_PATH = re.compile(r"(?<![\w.~$)}\]>-])/(?:work|farm|root|home|tmp|mnt|Users)/")
# In pieces, so that this file keeps the rule, too.
_HOSTS = [("pypi", "org"), ("python", "hosted"), ("repo1?", "maven"), ("repository", "apache"), ("maven", r"org\b")]
_HOSTS += [("npm", "js"), (r"(?:index|registry)-?\w*", "docker"), ("index", r"url\b"), ("trusted", "host")]
_REGISTRY = re.compile("|".join(r"[.-]?".join(parts) for parts in _HOSTS))


def tracked_files():
    """The text files that git tracks, except golden files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and "golden" not in path.parts:
            yield path


def text_of(path):
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode("utf-8", errors="replace")


def modules():
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def pure_modules():
    """The modules of the import-linter contract about pure rooms, packages with all that is in them."""
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["name"].startswith("pure rooms")]
    for dotted in pure["source_modules"]:
        path = ROOT.joinpath(*dotted.split("."))
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        yield from found


IMPORTED_INSIDE = {
    "pushrep.__getattr__": "whoever writes `pushrep.Outbox` imports it there",
    "spark_jobs.__getattr__": "as above",
    "pushrep.cli.outbox.rebase_command": "a command begins",
    "pushrep.cli.outbox.create": "a command begins",
    "pushrep.cli.replay.replicate": "a command begins",
    "pushrep.health.HealthServer.__init__": "an extra, loaded by the server's start",
    "pushrep.outbox.member_changes._metrics": "the health server, which all workers have, has loaded it",
    "pushrep.outbox.opening.open_all": "an outbox opens; what takes over has loaded it",
    "pushrep.outbox.opening._certificates_of": "an outbox opens; health and members' connections have loaded it",
    "pushrep.outbox.outbox.Outbox.open": "an outbox opens; a standby has loaded it",
    "pushrep.outbox.outbox.Outbox.stand_by": "a standby begins to wait",
    "pushrep.outbox.settings.OutboxSettings.__post_init__": "before an outbox opens, and before a standby waits",
    "pushrep.outbox.shipping.origin_of": "Kafka's rooms, which an opening without a destination does without",
    "pushrep.outbox.shipping.open_shipping": "an outbox opens; its settings have loaded it",
    "pushrep.pytest_plugin.pushrep_outbox": "a test begins; others load nothing",
    "pushrep.outbox.standby.WaitingMember._serve_health": "a standby begins to wait",
    "pushrep.replay.client.ReplayClient.subscribe": "a consumer is made",
    "pushrep.replay.client.ReplayClient._own_startpoints": "a consumer is made",
    "spark_jobs.file_marks.FileMarks.__init__": "before a query begins",
    "spark_jobs.file_marks.FileMarks._opened": "the store has loaded it when it was made",
    "spark_jobs.marks_command._given": "a command begins",
    "spark_jobs.marks_stores.in_spark": "a command begins",
    "spark_jobs.marks_stores.opened": "a command begins",
    "spark_jobs.sources.register_sources": "before a session has the source",
}
"""{function that imports one of our modules: why that is no import after an outbox, a node or a job is open}."""


def imports_of_ours(path):
    """The functions of a module that import a module of ours, by name, classes included."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                names = [child.module or ""]
            elif isinstance(child, ast.Call):  # of a name that only runs know
                called = getattr(child.func, "id", getattr(child.func, "attr", ""))
                names = [PACKAGES[0]] if called in {"import_module", "__import__"} else []
            is_ours = any(name.split(".")[0] in PACKAGES for name in names)
            if is_ours and any(not isinstance(one, ast.ClassDef) for one in inside):
                yield ".".join(one.name for one in inside)
            yield from visit(child, [*inside, child] if is_scope else inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), [])


def test_nothing_of_ours_is_imported_once_something_is_open():
    """The installation may be replaced meanwhile, and half of another release imported, or descriptors be short."""
    found = {
        ".".join([*path.relative_to(ROOT).with_suffix("").parts, where]).replace(".__init__.", ".", 1)
        for path in modules()
        for where in imports_of_ours(path)
    }
    assert found - set(IMPORTED_INSIDE) == set(), "import them at the top, or at the opening, with the reason"
    assert set(IMPORTED_INSIDE) - found == set(), "they import nothing any more: take them out of the list"


def test_no_tracked_file_names_a_machine_or_a_registry():
    faults = [
        f"{name(path)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if _MACHINE_PATH.search(line) or _REGISTRY.search(line)
    ]
    assert not faults, "paths of one machine or addresses of a registry:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    "parts",
    [
        ("see ", "/work", "/x"),
        ("'", "/tmp", "/a'"),
        ("cd ", "/root", "/x"),
        ("--index", "-url=x"),
        ("files.python", "hosted.org"),
        ("https:", "//py", "pi.org/project/x"),
        ("https:", "//py", "pi.org/simple"),
        ("repo.", "maven.apache"),
        ("repo1.", "maven"),
        ("central.maven", ".org"),
        ("registry.npm", "js.org"),
        ("registry-1.", "docker.io"),
        ("trusted", "-host"),
    ],
    ids="".join,
)
def test_the_rule_about_machines_finds_them(parts):
    text = "".join(parts)
    assert _MACHINE_PATH.search(text) or _REGISTRY.search(text)


@pytest.mark.parametrize("text", ["partitions/work/day", "docs/home/", "a.tmp", "https://example.org/a"])
def test_the_rule_about_machines_lets_others_pass(text):
    assert not _MACHINE_PATH.search(text)
    assert not _REGISTRY.search(text)


def test_every_public_module_tells_what_it_is():
    silent = [
        name(path)
        for path in modules()
        if (path.name == "__init__.py" or not path.name.startswith("_"))
        and (source := path.read_text(encoding="utf-8")).strip()  # an empty package has nothing to tell
        and not ast.get_docstring(ast.parse(source))
    ]
    assert not silent, f"without a docstring: {silent}"


@pytest.mark.parametrize("path", list(pure_modules()), ids=name)
def test_pure_rooms_import_neither_clock_nor_disk(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = {node.module.partition(".")[0]}
        else:
            continue
        assert not found & IMPURE, f"{name(path)}:{node.lineno} imports {sorted(found & IMPURE)}"


def test_spark_s_inner_objects_are_asked_in_one_module_only():
    inner = re.compile(r"(?<!self)\._(?:jvm|jdf|jsparkSession|jc|jo|jsc|gateway|active_spark_context)\b")
    users = {name(path) for path in modules() if inner.search(path.read_text(encoding="utf-8"))}
    assert users == {"spark_jobs/spark_internals.py"}


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "internals" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    records = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    assert records, "no decision records"
    missing = [record for record in records if f"]({record})" not in index]
    assert not missing, f"docs/internals/decisions/README.md does not link {missing}"
    numbers = [int(record[:4]) for record in records]
    assert numbers == sorted(set(numbers)), f"two decisions have one number: {records}"


@pytest.mark.parametrize("shelf", ["docs", "docs/internals"])
def test_every_page_is_on_its_shelf_s_list(shelf):
    index = (ROOT / shelf / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / shelf).glob("*.md")} - {"README.md"}
    missing = sorted(page for page in pages if f"]({page})" not in index)
    assert not missing, f"{shelf}/README.md does not list {missing}"


def test_the_changelog_begins_with_this_version_in_at_most_500_words():
    _, *sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections[0].startswith(f"{PYPROJECT['project']['version']} ("), "the first section is this version's"
    assert len(sections[0].split()) <= 500, f"{len(sections[0].split())} words: what matters to a user fits in 500"


def constraints():
    """{canonical name: version} of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(pin.name): str(next(iter(pin.specifier))) for pin in pins}


def requirements():
    """Every requirement of pyproject.toml, of extras and groups, too; not the extras that name the distribution."""
    project = PYPROJECT["project"]
    groups = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PYPROJECT["dependency-groups"].values(),
    ]
    wanted = [
        Requirement(text) for group in groups for text in group if isinstance(text, str)
    ]  # a table: another group
    return [requirement for requirement in wanted if requirement.name != project["name"]]


def test_constraints_pin_exactly_and_without_addresses():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text, "constraints.txt names versions, not places"
    loose = {package: pin for package, pin in constraints().items() if not re.fullmatch(r"==[0-9][\w.+!-]*", pin)}
    assert not loose, f"constraints.txt pins exactly: {loose}"


def test_constraints_pin_every_dependency_at_a_version_that_will_do():
    pins = constraints()
    missing = [str(r) for r in requirements() if canonicalize_name(r.name) not in pins]
    assert not missing, f"constraints.txt does not pin {missing}"
    wrong = [str(r) for r in requirements() if not r.specifier.contains(pins[canonicalize_name(r.name)][2:])]
    assert not wrong, f"constraints.txt pins a version that pyproject.toml refuses: {wrong}"


def test_the_version_is_said_once():
    assert version("pushrep") == PYPROJECT["project"]["version"], "installed from another state: run `make` again"


def test_files_that_share_a_spark_driver_are_run_by_one_process():
    """Else each process starts its own; only the collection knows which fixture a test uses, and not the scheduler."""
    users = {
        f"tests/kafka/{path.name}"
        for path in (ROOT / "tests" / "kafka").glob("test_*.py")
        if re.search(r"^def .*\bspark_driver[,)]", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {path for path, scope in SCOPES.items() if scope == "spark_driver"} == users
