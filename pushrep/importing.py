"""How our packages are found: whether another one hides a package of ours; and our version.

`filtering`, `partitioner` and `spark_jobs` are top-level packages of this distribution. A program that has a directory
of one of these names would import its own, and ours would fail somewhere inside: `refuse_hidden` says so in one line.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

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
