"""The size and shape of the product as a table: `python -m tests.house.figures`; with --budget as TOML.

    lines, statements   of every module of the four packages; a docstring is lines, no statement
    error classes       classes that stand, through bases by name, on Python's BaseException
    commands, options   of `pushrep`, groups left out; of Spark's jobs by what their parsers take
    settings            fields of the frozen dataclasses named in SETTINGS, and parameters of `Outbox.open`
    formats             FORMATS: what is written to a disk, a topic or a commit, by the module that has its name
    wire                files in pushrep/wire/schemas, and the messages that they describe
    stays               of the walks in WALKS: see `stays`

Imports are those that the text shows, inside functions too; a package's own `__init__` counts as a module. A floor is
one step of the longest chain of imports inside a room, an import circle is a group of modules that reach each other.
"""

import ast
import builtins
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
ROOMS = ("pushrep.log", "pushrep.outbox", "pushrep.kafka", "spark_jobs")
SMALL_LINES = 60
ONE_PER_CLIENT = {"ReplayFilteredConsumer", "SourcePartitionPartitioner", "SourcePartitionProducer"}
"""Public names that an adapter for each Kafka client has by intent: one meaning, chosen by what is imported."""


def dotted(path: Path) -> str:
    """The module's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """{module's name: its file} of the product, empty files left out."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {dotted(path): path for path in sorted(paths) if path.stat().st_size}


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in the parsed file."""
    gc.disable()  # which would look through the million nodes of the other files again and again, half of the time
    try:
        return list(ast.walk(tree(path)))
    finally:
        gc.freeze()
        gc.enable()


def public_classes() -> dict[str, list[str]]:
    """{class name: the modules that define it} of classes at a module's top without a leading underscore."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in sources().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return dict(found)


def double_names() -> dict[str, list[str]]:
    """The public class names that more than one module defines, without those that each client's adapter has."""
    found = sorted(public_classes().items())
    return {name: modules for name, modules in found if len(modules) > 1 and name not in ONE_PER_CLIENT}


@cache
def imports() -> dict[str, set[str]]:
    """{module: the modules of the product that it names in imports}."""
    known = sources().keys()
    edges: dict[str, set[str]] = {}
    for module, path in sources().items():
        found: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & known or {node.module}
        edges[module] = (found & known) - {module}
    return edges


@cache
def reachable(module: str) -> set[str]:
    """The modules of the product to which the imports of this one lead, itself among them."""
    found, waiting = {module}, [module]
    while waiting:
        new = imports()[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def groups(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Tarjan's strongly connected components; each comes after those that it reaches."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            yield stack[at:]
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            yield from visit(node)


def circles() -> list[list[str]]:
    """Groups of modules that import each other."""
    return [group for group in groups(imports()) if len(group) > 1]


def floors(room: str) -> int:
    """The length of the longest chain of imports inside the room; a circle is one floor."""
    inside = {module for module in sources() if module == room or module.startswith(f"{room}.")} - {room}
    edges = {module: reached & inside for module, reached in imports().items() if module in inside}
    height: dict[str, int] = {}
    for group in groups(edges):
        below = {other for module in group for other in edges[module]} - set(group)
        height |= dict.fromkeys(group, 1 + max((height[other] for other in below), default=0))
    return max(height.values(), default=0)


PUBLIC_IN_PYTHON = frozenset({"_asdict", "_exit", "_fields", "_make", "_replace"})
"""Documented for everyone, of named tuples and of os."""
OWNERS_OF_PUBLIC = {"self", "cls", "KafkaError"}
"""The client's documented error codes begin with an underscore where the client itself raises them."""


OF_OTHERS = frozenset(
    {"_create_unverified_context", "_gateway", "_gateway_client", "_jdf", "_jsc", "_jvm", "_reschedule", "_topics"}
)
"""Of ssl, pyspark, aiokafka and pytest-xdist, where those show no other way."""


def is_private(name: str) -> bool:
    """Whether it has one leading underscore."""
    return name.startswith("_") and not name.startswith("__")


@cache
def private_members() -> dict[str, list[str]]:
    """{member with one leading underscore: where a test names it of something that is not itself, or imports it}."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.is_relative_to(ROOT / "tests" / "support"):  # implementations of Protocols, with members of their own
            continue
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and node.attr not in PUBLIC_IN_PYTHON:
                own = isinstance(node.value, ast.Name) and node.value.id in OWNERS_OF_PUBLIC
                names = [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (*PACKAGES, "tests"):
                names = [alias.name for alias in node.names]
            for name in filter(is_private, names):
                found[name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return dict(found)


LINE_KINDS = ("code", "docstring", "comment", "blank")


@cache
def line_kinds(path: Path) -> dict[str, int]:
    """How many lines of the file are of each kind; a line of code with a comment behind it is code."""
    text = path.read_text(encoding="utf-8").splitlines()
    inside = {number for first, last in docstrings(path) for number in range(first, last + 1)}
    found = dict.fromkeys(LINE_KINDS, 0)
    for number, line in enumerate(text, 1):
        bare = line.strip()
        kind = "docstring" if number in inside else "blank" if not bare else "comment" if bare[0] == "#" else "code"
        found[kind] += 1
    return found


def is_text(node: ast.stmt) -> bool:
    """Whether the statement is a string alone: a docstring, also of a constant or a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def docstrings(path: Path) -> Iterator[tuple[int, int]]:
    """First and last line of each."""
    for node in nodes(path):
        if isinstance(node, ast.stmt) and is_text(node):
            yield node.lineno, node.end_lineno or node.lineno


def statements(path: Path) -> int:
    """Statements of the file, definitions included, docstrings not."""
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes(path))


def error_classes() -> dict[str, list[str]]:
    """{class of an error: the modules that define it}, private ones and those inside functions too."""
    bases: dict[str, set[str]] = defaultdict(set)
    where: dict[str, list[str]] = defaultdict(list)
    for module, path in sources().items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                where[node.name].append(module)
    errors = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    errors |= {"ClickException", "UsageError", "BadParameter"}  # click's
    known = set(errors)
    while more := {name for name, over in bases.items() if over & known} - known:
        known |= more
    return {name: where[name] for name in sorted(known - errors) if name in where}


def commands() -> dict[str, list[str]]:
    """{command: its options' names} of `pushrep`, groups left out unless they have options or do something alone."""
    from pushrep.cli.main import cli

    found: dict[str, list[str]] = {}

    def visit(command: click.Command, path: tuple[str, ...]) -> None:
        options = [max(one.opts, key=len) for one in command.params if isinstance(one, click.Option)]
        options = [name for name in options if name not in {"--help", "--version"}]
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None, name
                visit(below, (*path, name))
            if options:
                found[" ".join((*path, "*"))] = options
        else:
            found[" ".join(path)] = options

    visit(cli, ("pushrep",))
    return found


def job_options() -> int:
    """The options of the jobs of Spark."""
    from spark_jobs.jobs.apply import main as apply
    from spark_jobs.jobs.relay import main as relay

    options = [one for job in (apply, relay) for one in job.params if isinstance(one, click.Option)]
    return sum(one.name not in {"help", "version"} for one in options)


SETTINGS = ("LogConfig", "KafkaDestination", "OutboxConfig", "HealthSettings", "PushSettings", "NodeSettings")
"""Frozen dataclasses whose fields users set."""


def settings() -> dict[str, int]:
    """How many fields each of SETTINGS has, where it is there, and how many parameters `Outbox.open`."""
    found = {}
    for path in sources().values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.name in SETTINGS:
                found[node.name] = sum(isinstance(one, ast.AnnAssign) and not private(one) for one in node.body)
            if isinstance(node, ast.ClassDef) and node.name == "Outbox":
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and one.name == "open":
                        found["Outbox.open"] = len(one.args.args) + len(one.args.kwonlyargs) - 1
    return found


def private(field: ast.AnnAssign) -> bool:
    """Whether the annotated name is private."""
    return isinstance(field.target, ast.Name) and is_private(field.target.id)


FORMATS = {
    "record batch (.log)": "pushrep.records.header",
    ".index, .timeindex": "pushrep.log.indexes",
    ".seal": "pushrep.log.seals",
    ".lock": "pushrep.log.directory_files",
    "offset checkpoints (recovery point, log start, high watermark, given up)": "pushrep.log.directory_files",
    "leader-epoch-checkpoint": "pushrep.log.directory_files",
    "partition.metadata": "pushrep.log.directory_files",
    ".pushrep_cleanshutdown": "pushrep.log.directory_files",
    ".pushrep_published": "pushrep.log.published",
    "directory-id.json": "pushrep.log.directory_id",
    "outbox.json": "pushrep.outbox.identity",
    "settings.json": "pushrep.outbox.kept_settings",
    "outbox-positions": "pushrep.outbox.positions",
    "table-relay.json": "pushrep.outbox.relay_note",
    "destinations.json": "pushrep.kafka.progress",
    "the parking log": "pushrep.kafka.parking",
    "promises.json": "pushrep.replicate.election_state",
    "replica-epoch.json": "pushrep.replicate.election_state",
    "owner.json": "pushrep.replicate.access",
    ".pushrep_recordings": "pushrep.replay.catalogue",
    "startpoints.journal": "pushrep.startpoints.journal",
    "checkpoints of plain consumers": "pushrep.startpoints.journal",
    "startpoints in a topic": "pushrep.kafka.startpoints",
    "control.sock": "pushrep.outbox.control",
    "stream metadata": "filtering.stream_metadata",
    "marks": "filtering.marks",
    "position in a commit": "filtering.consumers.commits",
    "marks of consumers in a topic": "filtering.consumers.commits",
    "marks of a batch": "spark_jobs.batch_marks",
    "a relay's epochs": "spark_jobs.jobs.relaying",
    "the topics of a job": "spark_jobs.jobs.source_topics",
    "a table's owners": "spark_jobs.sinks.directory_table",
}
"""What is written for another run or program to read: the module that knows its bytes. Whose module is gone is gone."""


def schemas() -> list[Path]:
    """The files that describe the calls' fields."""
    return sorted((ROOT / "pushrep/wire/schemas").glob("*.avsc"))


WALKS = {
    "append": ("pushrep.outbox.outbox", "Outbox.append", "value"),
    "batch": ("spark_jobs.replay_filter", "ReplayFilteredBatches.__call__", "df"),
    "opening": ("pushrep.outbox.outbox", "Outbox.open", "directory"),
    "replay": ("pushrep.replay.local", "LocalReplays.start_replay", "request"),
    "startpoint": ("pushrep.startpoints.store", "StartpointStore.start", "log"),
}
"""Where the five walks of the map begin: module, function, parameter."""

STAND_INS = "pushrep.testing"


class Walk:
    """Follows a value through the text of the functions that it is passed to, depth first, each function once.

    A name or attribute that is assigned the value, a part of it, or what a call with the value as an argument gives,
    carries it on. A call is entered if one of its arguments, or the object that it is called on, carries the value and
    the text says which function of ours it is: a name of the module or an import, a method of the same class, or a
    method that one class of the product alone has, if the caller's imports lead to that class and no container or
    text of Python's own has it: `collect` of another library is not ours, nor `items` of a mapping or `join` of a text.
    What stands in for our classes in users' tests has their methods, too, and is left out.
    A class is entered by its `__init__`, or not at all.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self._names: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        methods: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for module, path in sources().items():
            for node in tree(path).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._functions[module, node.name] = node
                    self._names[module][node.name] = (module, node.name)
                elif isinstance(node, ast.ClassDef):
                    self._names[module][node.name] = (module, f"{node.name}.__init__")
                    for one in node.body:
                        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                            self._functions[module, f"{node.name}.{one.name}"] = one
                            if module == STAND_INS:
                                continue
                            methods[one.name].append((module, f"{node.name}.{one.name}"))
        of_python = {name for kind in (bytes, dict, list, set, str) for name in dir(kind)}
        self._unique = {name: where[0] for name, where in methods.items() if len(where) == 1 and name not in of_python}
        for module, path in sources().items():
            for node in nodes(path):
                if isinstance(node, ast.ImportFrom) and node.module in self._names:
                    for alias in node.names:
                        if target := self._names[node.module].get(alias.name):
                            self._names[module].setdefault(alias.asname or alias.name, target)

    def follow(self, module: str, name: str, parameters: set[str], entered: list[tuple[str, str]]) -> None:
        """Enter the function with the value in these parameters; `entered` gets each function that it comes into."""
        function = self._functions.get((module, name))
        if function is None or (module, name) in entered:
            return
        entered.append((module, name))
        carrying = set(parameters)
        for node in self._in_order(function):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.withitem):
                self._spread(node, carrying)
            elif isinstance(node, ast.Call):
                self._enter(module, name, node, carrying, entered)

    def _in_order(self, node: ast.AST) -> Iterator[ast.AST]:
        """Nodes below, a call behind its arguments and an assignment behind its value."""
        for child in ast.iter_child_nodes(node):
            yield from self._in_order(child)
            yield child

    def _spread(self, node: ast.AST, carrying: set[str]) -> None:
        source = getattr(node, "iter", None) or getattr(node, "context_expr", None) or getattr(node, "value", None)
        if source is None or not self._made_of(source, carrying):
            return
        target = getattr(node, "optional_vars", None) or getattr(node, "target", None)
        for one in [target] if target is not None else getattr(node, "targets", []):
            carrying |= {ast.unparse(part) for part in ast.walk(one) if isinstance(part, ast.Name | ast.Attribute)} - {
                "self"
            }

    def _made_of(self, node: ast.AST, carrying: set[str]) -> bool:
        """Whether what the expression gives is the value, a part of it, or made with it: no comparison, no text."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            return ast.unparse(node) in carrying or self._made_of(getattr(node, "value", None), carrying)
        if isinstance(node, ast.Call):
            return any(self._made_of(one, carrying) for one in (*node.args, *(one.value for one in node.keywords)))
        if isinstance(node, ast.IfExp):
            return self._made_of(node.body, carrying) or self._made_of(node.orelse, carrying)
        if isinstance(node, ast.BinOp):
            return self._made_of(node.left, carrying)
        return False

    @staticmethod
    def _carries(node: ast.AST, carrying: set[str]) -> bool:
        return any(
            isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in carrying for part in ast.walk(node)
        )

    def _enter(
        self, module: str, name: str, call: ast.Call, carrying: set[str], entered: list[tuple[str, str]]
    ) -> None:
        target = self._target(module, name, call.func)
        if target is None:
            return
        function = self._functions.get(target)
        if function is None:
            return
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        bound = set()
        if names and names[0] in {"self", "cls"}:
            if isinstance(call.func, ast.Attribute) and self._carries(call.func.value, carrying):
                bound.add("self")
            names = names[1:]
        for argument, parameter in zip(call.args, names, strict=False):
            if self._carries(argument, carrying):
                bound.add(parameter)
        bound |= {one.arg or "" for one in call.keywords if self._carries(one.value, carrying)} - {""}
        if bound:
            self.follow(*target, bound, entered)

    def _target(self, module: str, name: str, called: ast.expr) -> tuple[str, str] | None:
        if isinstance(called, ast.Name):
            return self._names[module].get(called.id)
        if not isinstance(called, ast.Attribute):
            return None
        if isinstance(called.value, ast.Name) and called.value.id in {"self", "cls"} and "." in name:
            mine = (module, f"{name.split('.', maxsplit=1)[0]}.{called.attr}")
            if mine in self._functions:
                return mine
        if isinstance(called.value, ast.Name) and (owner := self._names[module].get(called.value.id)):
            one = (owner[0], f"{owner[1].split('.')[0]}.{called.attr}")
            if one in self._functions:
                return one
        found = self._unique.get(called.attr)
        return found if found and found[0] in reachable(module) else None


@cache
def walker() -> Walk:
    """Of the product as it is."""
    return Walk()


@cache
def walked(walk: str) -> list[tuple[str, str]]:
    """(module, function) that the value of the walk enters, in order; empty where its beginning is not there."""
    module, name, parameter = WALKS[walk]
    entered: list[tuple[str, str]] = []
    walker().follow(module, name, {parameter}, entered)
    return entered


def stays(walk: str) -> int:
    """How often the value of the walk comes into a module: functions of one module in a row are one stay."""
    modules = [module for module, _ in walked(walk)]
    return len([module for module, _group in groupby(modules)])


def lines(path: Path) -> int:
    """Lines of the file."""
    return sum(line_kinds(path).values())


def figures() -> dict[str, int]:
    """The values of the table by label."""
    product = sources()
    kinds = {kind: sum(line_kinds(path)[kind] for path in product.values()) for kind in LINE_KINDS}
    found = commands()
    return {
        "lines": sum(kinds.values()),
        **{f"  {kind}": count for kind, count in kinds.items()},
        "statements": sum(map(statements, product.values())),
        "modules": len(product),
        **{f"  of {room}": sum(m == room or m.startswith(f"{room}.") for m in product) for room in ROOMS},
        f"modules of at most {SMALL_LINES} lines": sum(lines(path) <= SMALL_LINES for path in product.values()),
        "error classes": len(error_classes()),
        "commands": sum(not name.endswith("*") for name in found),
        "options": sum(map(len, found.values())),
        "options of Spark's jobs": job_options(),
        "settings": sum(settings().values()),
        "file formats": sum(module in product for module in FORMATS.values()),
        "wire schemas": len(schemas()),
        "wire messages": len({path.name.split(".")[0] for path in schemas()}),
        **{f"stays of {walk}": stays(walk) for walk in WALKS},
        "public class names with two meanings": len(double_names()),
        "import circles": len(circles()),
        **{f"floors of {room}": floors(room) for room in ROOMS},
        "private members of ours that tests name": sum(
            len(where) for name, where in private_members().items() if name not in OF_OTHERS
        ),
        "private members of other libraries": sum(
            len(where) for name, where in private_members().items() if name in OF_OTHERS
        ),
    }


def main() -> None:
    """Print the table; with --names what to rename and to untie; with --walks where the walks go."""
    if "--budget" in sys.argv:
        rows = [f'"{label.strip()}" = {figure}' for label, figure in figures().items()]
    else:
        rows = [f"{label:42}{figure:8,}" for label, figure in figures().items()]
    if "--names" in sys.argv:
        rows += [" ".join((name, *modules)) for name, modules in double_names().items()]
        rows += [" ".join(("circle:", *circle)) for circle in circles()]
    if "--walks" in sys.argv:
        rows += [f"{walk}: {module} {name}" for walk in WALKS for module, name in walked(walk)]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
