"""Old names of modules that docs showed: they import, warn, and give the very objects of the new ones."""

import sys
import warnings
from importlib import import_module

import pytest

from pushrep.importing import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_the_old_name_imports_with_a_warning_and_gives_the_same_objects(old, monkeypatch):
    with warnings.catch_warnings(action="ignore"):
        import_module(old.rpartition(".")[0])
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{old} is {MOVED[old]}$"):
        module = import_module(old)
    there = import_module(MOVED[old])
    shown = getattr(there, "__all__", None) or [name for name in vars(there) if not name.startswith("_")]
    assert all(getattr(module, name) is getattr(there, name) for name in shown)
    with pytest.raises(ImportError):
        import_module(f"{old}.nothing")
