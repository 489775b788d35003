"""A package of ours that is hidden by another of its name, which stands before it on the path.

`filtering`, `partitioner` and `spark_jobs` are top-level packages of this distribution. A program of its own with a
directory of one of these names gets its own one, and ours fails somewhere inside: said here in one line instead.
"""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("filtering", "partitioner", "pushrep", "spark_jobs")
_HOME = Path(__file__).parent.parent


def why_hidden(name: str) -> str | None:
    """One line that names both, None if the package that is imported as `name` is ours, or ours is not beside us."""
    ours = _HOME / name
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
