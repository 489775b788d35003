"""Modules that docs or examples showed under another name: the old name still imports, with a DeprecationWarning.

A finder, not directories: git leaves an old directory with its bytecode behind, which Python takes for a package.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
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
        """A name of the old module is the new one's, the same object: `except` and `isinstance` hold across both."""
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new}", DeprecationWarning, stacklevel=2)
        there = import_module(new)
        module.__doc__ = there.__doc__
        module.__dict__["__getattr__"] = lambda name: getattr(there, name)


def let_moved_modules_import() -> None:
    """Once, before anything of pushrep is looked for."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
