"""Optional packages: which extra of pushrep brings a missing one, and the command that installs it here."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

EXTRA_OF = {
    "aiokafka": "kafka",
    "confluent_kafka": "kafka",
    "django": "django",
    "jinja2": "console",
    "opentelemetry": "tracing",
    "pandas": "spark",
    "prometheus_client": "metrics",
    "psycopg": "sql",
    "pyarrow": "spark",
    "pyspark": "spark",
    "sqlalchemy": "tables",
    "starlette": "console",
    "uvicorn": "console",
}
"""A package that is imported: the extra that brings it."""


class MissingExtra(ModuleNotFoundError):
    """An optional package is not installed; the message is the command that brings it. `extra` names the extra."""

    def __init__(self, what: str, package: str) -> None:
        self.extra = EXTRA_OF.get(package, package)
        super().__init__(
            f"{what} needs the Python package {package!r}, which is not installed: {install_command(package)}",
            name=package,
        )


@contextmanager
def needed_by(what: str, *, is_program: bool = False) -> Iterator[None]:
    """Raises MissingExtra where a package of an extra that is imported inside the block is not installed.

    is_program: ends with that line instead.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not isinstance(error, MissingExtra) and package not in EXTRA_OF:
            raise
        missing = error if isinstance(error, MissingExtra) else MissingExtra(what, package)
        if is_program:
            sys.exit(f"error: {missing}")
        raise missing from error.__cause__ or error


def install_command(package: str) -> str:
    """For a shell: from where pushrep itself was installed, or the package alone if pushrep was not installed."""
    from importlib.metadata import Distribution, PackageNotFoundError  # noqa: PLC0415 - 3,500 objects, for an error

    extra = EXTRA_OF.get(package)
    try:
        found = Distribution.from_name("pushrep").read_text("direct_url.json")
    except PackageNotFoundError:
        return f"pip install {package.replace('_', '-')}"
    if extra is None:
        return f"pip install {package.replace('_', '-')}"
    if found is None:  # from an index, by its name (PEP 610)
        return f"pip install 'pushrep[{extra}]'"
    direct = json.loads(found)
    url, repository = direct["url"], direct.get("vcs_info")
    if repository is not None:
        return f"pip install 'pushrep[{extra}] @ {repository['vcs']}+{url}'"
    if not url.startswith("file:"):
        return f"pip install 'pushrep[{extra}] @ {url}'"
    flag = "-e " if direct.get("dir_info", {}).get("editable") else ""
    return f"pip install {flag}'{unquote(urlsplit(url).path)}[{extra}]'"
