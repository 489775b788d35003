"""`python -m tests.house.floors`: what pyproject.toml and its extras allow at their lowest, as constraints for pip.

The tests' tools keep their versions of constraints.txt: a run judges our bounds, not newer tools.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def floors() -> dict[str, str]:
    """The lowest version of each package that the project or an extra names."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    found = {}
    for requirement in map(
        Requirement, [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    ):
        (lowest,) = [one.version for one in requirement.specifier if one.operator == ">="]
        found[canonicalize_name(requirement.name)] = lowest
    return found


def main() -> None:
    """Print them, one a line."""
    lowest = floors()
    named = [one for group in PROJECT["dependency-groups"].values() for one in group if isinstance(one, str)]
    tools = {canonicalize_name(Requirement(one).name) for one in named} - lowest.keys()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [pin for pin in pins if canonicalize_name(pin.partition("==")[0]) in tools]
    sys.stdout.write("\n".join([f"{name}=={version}" for name, version in lowest.items()] + kept) + "\n")


if __name__ == "__main__":
    main()
