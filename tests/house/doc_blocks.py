"""The examples in Markdown files, and a runner: `python doc_blocks.py FILE... [--with-spark] [--with-kafka=ADDRESS]`.

    ```python       executed; the blocks of one file share a namespace, in order
    ```console      each line that begins with `$ ` is run by bash, with this interpreter's programs first in PATH

A comment on the line before the fence has more: `<!-- spark -->` (needs a Spark session), `<!-- kafka -->` (needs a
broker: `localhost:9092` is replaced by the broker's real address), `<!-- file: NAME -->` (any fence: it is written to
that file, not run), `<!-- no-test: reason -->`. Any other fence is not run. A traceback has the Markdown file and its
line. A page that says `kill -9` gets a process for each `pushrep`, to be killed; elsewhere they are forked of one.
Addresses 127.0.0.1:74NN are replaced by free ones.

With several files, each begins with an empty directory, without variables and without a Spark session. They share this
process and its JVM, because a JVM takes longer to start than a page to run. So `$ python -m spark_jobs.jobs....` runs
in this process, too, and so does `$ python FILE` of a block with Spark. A warning fails, except in blocks with Spark,
whose own code warns.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from runpy import run_path
from textwrap import dedent

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_NO_TEST = re.compile(r"<!--\s*no-test:\s*(?P<reason>.*?)\s*-->")
_SPARK = re.compile(r"<!--\s*spark\s*-->")
_KAFKA = re.compile(r"<!--\s*kafka\s*-->")
_FILE = re.compile(r"<!--\s*file:\s*(?P<name>\S+)\s*-->")
_JOB = re.compile(r"python -m (?P<module>spark_jobs\.jobs\.\w+) (?P<arguments>[^|<>&;$]*)")
_PROGRAM = re.compile(r"python (?P<file>\w+\.py) 2> \S+")
_ADDRESS = "localhost:9092"
_PORT = re.compile(r"127\.0\.0\.1:74\d\d\b")
_PYTHON = sys.executable
COMMANDS = Path(__file__).with_name("programs")
"""`pushrep`, without the time that it takes to start."""


@dataclass(frozen=True, slots=True)
class Block:
    """One example: `line` is that of its first line of code, counted from 1."""

    path: Path
    line: int
    language: str
    code: str
    needs_spark: bool
    needs_kafka: bool
    skip_reason: str | None
    file: str | None = None


def blocks_of(path):
    """Every python, console and file block of the page. Raises ValueError for a fence that is never closed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found, at = [], 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        at += 1
        if fence is None:
            continue
        start = at
        while at < len(lines) and lines[at].strip() != fence["ticks"]:
            at += 1
        if at == len(lines):
            raise ValueError(f"{path.name}:{start}: a block is opened and never closed")
        before = lines[start - 2] if start >= 2 else ""
        file = _FILE.search(before)
        if file or fence["language"] in {"python", "console"}:
            skip = _NO_TEST.search(before)
            code = dedent("\n".join(lines[start:at]))
            reason = skip["reason"] if skip else None
            needs = bool(_SPARK.search(before)), bool(_KAFKA.search(before))
            found.append(Block(path, start + 1, fence["language"], code, *needs, reason, file and file["name"]))
        at += 1
    return found


def with_free_ports(blocks):
    """Each address 127.0.0.1:74NN of a page becomes one that nobody listens on: pages run beside each other."""
    with ExitStack() as held:  # all at once, so that they differ
        taken = defaultdict(lambda: held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
        return [
            replace(block, code=_PORT.sub(lambda found: f"127.0.0.1:{taken[found[0]]}", block.code)) for block in blocks
        ]


def commands_of(block):
    """The commands of a console block. A line that ends with a backslash continues on the next one."""
    commands, continued = [], False
    for line in block.code.splitlines():
        if continued:
            commands[-1] += "\n" + line.removeprefix("> ")
        elif line.startswith("$ "):
            commands.append(line[2:])
        else:
            continue  # what the command prints
        continued = commands[-1].endswith("\\")
    return commands


def run_blocks(blocks):
    """Run them in the current directory; the first failure raises."""
    namespace = {"__name__": "__main__"}
    # Commands run as in an activated environment. Python blocks don't: Spark's workers are to find the driver's Python.
    kills = any("kill -9" in block.code for block in blocks)
    examples = Path(__file__).parents[2] / "examples"  # certificates.sh
    places = [*([] if kills else [str(COMMANDS)]), str(Path(_PYTHON).parent), str(examples), os.environ["PATH"]]
    activated = os.environ | {"PATH": os.pathsep.join(places)}
    activated = {"PUSHREP_TESTS_COMMANDS_OF": str(os.getpid()), "PUSHREP_TESTS_PYTHON": _PYTHON} | activated
    for block in blocks:
        if block.file:
            Path(block.file).write_text(f"{block.code}\n", encoding="utf-8")
            continue
        if block.language == "python":
            # The empty lines put the code where it stands in the file, so that tracebacks point there.
            with warnings.catch_warnings():
                if not block.needs_spark:
                    warnings.simplefilter("error")
                exec(compile("\n" * (block.line - 1) + block.code, str(block.path), "exec"), namespace)
            continue
        for command in commands_of(block):
            if job := _JOB.fullmatch(command):
                run_job(block, job["module"], shlex.split(job["arguments"]))
                continue
            if block.needs_spark and (program := _PROGRAM.fullmatch(command)):
                run_path(program["file"], run_name="__main__")
                continue
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=False, env=activated)
            if done.returncode != 0:
                sys.exit(f"{block.path}:{block.line}: exit code {done.returncode} from: {command}")


def run_job(block, module, arguments):
    """Run the job's command, in the present Spark session or in a new one."""
    try:
        import_module(module).main(arguments)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{block.path}:{block.line}: exit code {ended.code} from: {module} {shlex.join(arguments)}")


def clear(settings):
    """Leave no session and no file to the next page; what these settings of Spark were is forgotten."""
    if "pyspark" in sys.modules:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if (session := SparkSession.getActiveSession()) is not None:
            session.stop()
        for name in settings:
            SparkContext._jvm.System.clearProperty(name)
    for left in Path().iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    with_spark = "--with-spark" in sys.argv
    address = next((flag.partition("=")[2] for flag in sys.argv if flag.startswith("--with-kafka=")), None)
    # What Spark's workers run in unless told otherwise is the driver's Python.
    sys.executable = os.environ.get("PUSHREP_DRIVER_PYTHON", sys.executable)
    for number, path in enumerate(pages := [Path(word) for word in sys.argv[1:] if not word.startswith("--")]):
        if number:
            is_last = path == pages[-1]
            clear(os.environ.get("PUSHREP_TESTS_LAST_PAGE_WITHOUT", "").split() if is_last else ())
        run_blocks(
            with_free_ports(
                replace(block, code=block.code.replace(_ADDRESS, address or _ADDRESS))
                for block in blocks_of(path)
                if block.skip_reason is None
                and (with_spark or not block.needs_spark)
                and (address is not None or not block.needs_kafka)
            )
        )
