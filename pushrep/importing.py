"""How our packages are found: modules that moved, a package of ours that another one hides; and our version.

A module that docs or examples showed under another name still imports by the old one, with a DeprecationWarning. A
finder does this, not directories: git leaves old directories with bytecode behind, which Python takes for packages.

`filtering`, `partitioner` and `spark_jobs` are top-level packages of this distribution. A program that has a directory
of one of these names would import its own, and ours would fail somewhere inside: `refuse_hidden` says so in one line.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

MOVED = {
    "pushrep.log.recovery_plan": "pushrep.log.recovery",
    "pushrep.node": "pushrep.replicate",
    "pushrep.node.metrics": "pushrep.replicate.node_metrics",
    "pushrep.protocol": "pushrep.wire",
    "pushrep.protocol.client": "pushrep.wire.client",
    "pushrep.protocol.push_messages": "pushrep.wire.push_messages",
    "pushrep.protocol.server": "pushrep.wire.server",
    "pushrep.push": "pushrep.replicate",
    "pushrep.push.certificates": "pushrep.replicate.certificates",
    "pushrep.push.settings": "pushrep.replicate.settings",
    "pushrep.push.sockets": "pushrep.replicate.sockets",
    "pushrep.replication": "pushrep.election",
    "pushrep.replication.errors": "pushrep.election.errors",
    "pushrep.replication.grants": "pushrep.election.grants",
}


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Names of the old module are the same objects as the new one's, so that `except` and `isinstance` work across
        both.
        """
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new}", DeprecationWarning, stacklevel=2)
        moved = import_module(new)
        module.__doc__ = moved.__doc__
        module.__dict__["__getattr__"] = lambda name: getattr(moved, name)


def let_moved_modules_import() -> None:
    """Install the finder, once, before anything of pushrep is imported."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
_INSTALLED_IN = Path(__file__).parent.parent


def why_hidden(name: str) -> str | None:
    """One line that names both, None if the package that is imported as `name` is ours, or ours is not beside us."""
    ours = _INSTALLED_IN / name
    spec = find_spec(name)
    if spec is None or not (ours / "__init__.py").is_file():
        return None
    places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
    theirs = Path(places[0]) if places else ours
    if theirs.name == "__init__.py":
        theirs = theirs.parent
    if theirs == ours or (theirs.exists() and theirs.samefile(ours)):
        return None
    return (
        f"{theirs} hides the package {name!r} of pushrep, {ours}: rename yours, or take its directory off the path "
        "(PYTHONPATH, the directory of the program)"
    )


def refuse_hidden(name: str) -> None:
    """Raises ImportError with both paths."""
    if (why := why_hidden(name)) is not None:
        raise ImportError(why, name=name)


@cache
def installed_version() -> str:
    """The version of the installed pushrep; the first call searches files for milliseconds."""
    from importlib.metadata import version  # noqa: PLC0415 - its import costs as much as the search

    return version("pushrep")
