"""Whether Spark will find a Java that is new enough. Without one Spark itself says only that a gateway exited."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from spark_jobs.errors import SparkUnfit

JAVA_MIN: Final = 17


def java_version(banner: str) -> int | None:
    """The feature release that `java -version` prints (17 for 17.0.15, 8 for 1.8.0), or None."""
    found = re.search(r'version "(?:1\.)?(\d+)', banner)
    return int(found[1]) if found else None


def require_java() -> None:
    """Raise SparkUnfit unless Spark will find a Java that is new enough: $JAVA_HOME first, then the PATH."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"Spark needs Java {JAVA_MIN} or newer (OpenJDK will do): install it, or point JAVA_HOME at one"
    if program is None or shutil.which(program) is None:
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise SparkUnfit(f"{where}; {advice}")
    printed = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)  # noqa: S603 - Java itself
    version = java_version(printed.stderr + printed.stdout)
    if version is None or version < JAVA_MIN:
        raise SparkUnfit(f"{program} is {f'Java {version}' if version else 'of an unknown version'}; {advice}")
