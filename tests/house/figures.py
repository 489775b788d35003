"""The size and shape of the product as a table: `python -m tests.house.figures`.

Imports are those that the text shows, inside functions too; a package's own `__init__` counts as a module. A floor is
one step of the longest chain of imports inside a room, an import circle is a group of modules that reach each other.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

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


def is_demo(module: str) -> bool:
    """Whether the module belongs to a demo, which is not installed with a service."""
    return "demo" in module.split(".")


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


def imports() -> dict[str, set[str]]:
    """{module: the modules of the product that it names in imports}."""
    known = sources().keys()
    edges: dict[str, set[str]] = {}
    for module, path in sources().items():
        found: set[str] = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & known or {node.module}
        edges[module] = (found & known) - {module}
    return edges


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


OF_OTHERS = frozenset({"_create_unverified_context", "_gateway", "_gateway_client", "_jdf", "_jsc", "_jvm", "_topics"})
"""Of ssl, pyspark and aiokafka, where those show no other way."""


def is_private(name: str) -> bool:
    """Whether it has one leading underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_members() -> dict[str, list[str]]:
    """{member with one leading underscore: where a test names it of something that is not itself, or imports it}."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.is_relative_to(ROOT / "tests" / "support"):  # implementations of Protocols, with members of their own
            continue
        for node in ast.walk(tree(path)):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and node.attr not in PUBLIC_IN_PYTHON:
                own = isinstance(node.value, ast.Name) and node.value.id in OWNERS_OF_PUBLIC
                names = [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (*PACKAGES, "tests"):
                names = [alias.name for alias in node.names]
            for name in filter(is_private, names):
                found[name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return dict(found)


def lines(path: Path) -> int:
    """Lines of the file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def figures() -> dict[str, int]:
    """The values of the table by label."""
    product = {module: path for module, path in sources().items() if not is_demo(module)}
    classes = [node for path in product.values() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    return {
        "lines without the demos": sum(map(lines, product.values())),
        "lines of the demos": sum(lines(path) for module, path in sources().items() if is_demo(module)),
        "modules without the demos": len(product),
        **{f"  of `{room}`": sum(m == room or m.startswith(f"{room}.") for m in product) for room in ROOMS},
        f"modules of at most {SMALL_LINES} lines": sum(lines(path) <= SMALL_LINES for path in product.values()),
        "classes": len(classes),
        "public class names with two meanings": len(double_names()),
        "import circles": len(circles()),
        **{f"floors of `{room}`": floors(room) for room in ROOMS},
        "private members of ours that tests name": sum(
            len(where) for name, where in private_members().items() if name not in OF_OTHERS
        ),
        "and of other libraries": sum(len(where) for name, where in private_members().items() if name in OF_OTHERS),
    }


def main() -> None:
    """Print the table; with --names what to rename and to untie."""
    rows = [f"{label:42}{figure:8,}" for label, figure in figures().items()]
    if "--names" in sys.argv:
        rows += [" ".join((name, *modules)) for name, modules in double_names().items()]
        rows += [" ".join(("circle:", *circle)) for circle in circles()]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
