"""The Python that the tests give to Spark's JVMs behaves like the interpreter that it replaces."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests.programs import PUSHREP, mentioning
from tests.spark_programs import WORKERS_PYTHON

pytest.importorskip("pyspark")

PROGRAM = """
import os, signal, sys
if __name__ == "__main__":
    print(os.getcwd(), os.environ["SAID"], sys.argv[1:], sys.stdin.read(), "pandas" in sys.modules, flush=True)
    print("an error", file=sys.stderr)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "a_program_of_spark.py").write_text(PROGRAM)
    (tmp_path / "a_reader.py").write_text("import sys; print('begun', flush=True); sys.stdin.read()")
    return tmp_path


def told(python, place, argument, **environment):
    done = subprocess.run(
        [python, "-m", "a_program_of_spark", argument, "x"],
        cwd=place, env=os.environ | {"SAID": argument} | environment,
        input="in", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="there Python starts as always")
def test_a_fork_is_as_a_start_but_has_its_libraries(place):
    for argument in ("0", "3", "killed"):
        forked, started = told(WORKERS_PYTHON, place, argument), told(sys.executable, place, argument)
        assert (forked[1].pop(), started[1].pop()) == ("True", "False"), "forked, or started"
        assert forked == started
    twice = os.pathsep.join(2 * [os.environ.get("PYTHONPATH", "")])
    assert told(WORKERS_PYTHON, place, "0", PYTHONPATH=twice)[0] == 0
    assert len(mentioning(f"--serve\0workers\0{os.getpid()}\0")) == 1, "one server for this parent"


@pytest.mark.skipif(sys.platform != "linux", reason="there Python starts as always")
def test_beside_a_server_that_does_not_listen_yet_it_starts_as_always(place):
    """Spark starts two Pythons at once: the second one's server finds the name bound by the first one's."""
    environment = {"PYTHONPATH": str(place)}
    began = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"\0pushrep-tests-workers-{os.getpid()}-{began}-{zlib.crc32(str(place).encode())}")
        code, said, error = told(WORKERS_PYTHON, place, "0", **environment)
    assert (code, said[-1]) == (0, "False"), error


@pytest.mark.parametrize(
    "words", [["--version"], ["append", "out", "t", "-"], ["log", "verify", "nowhere"], ["log", "no-such"]]
)
def test_a_command_of_the_docs_is_as_the_one_that_is_installed(tmp_path, words):
    def told(program, place):
        (tmp_path / place).mkdir()
        return subprocess.run(
            [program, *words], cwd=tmp_path / place, input=b"a\nb\n", capture_output=True, timeout=120
        )

    def untimed(said):
        return re.sub(rb"in \d+\.\d s", b"in time", said)

    forked, started = told(PUSHREP, "forked"), told(Path(sys.executable).with_name("pushrep"), "started")
    assert forked.returncode == started.returncode
    assert (untimed(forked.stdout), forked.stderr) == (untimed(started.stdout), started.stderr)
    assert [path.name for path in (tmp_path / "forked").rglob("*.log")] == [
        path.name for path in (tmp_path / "started").rglob("*.log")
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="there Python starts as always")
def test_it_ends_with_who_asked_and_the_server_with_its_parent(place):
    """A forked worker ends with the process that started it, like Spark's workers, and the fork server with the JVM."""
    command = [WORKERS_PYTHON, "-m", "a_reader"]
    pipes = {"cwd": place, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as reader:
        assert reader.stdout.readline() == b"begun\n"
        reader.send_signal(signal.SIGTERM)
        assert reader.stdout.read() == b"", "nobody has its output open any more"
    with subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command})"], **pipes) as parent:
        assert parent.stdout.readline() == b"begun\n"
        server = f"--serve\0workers\0{parent.pid}\0"
        assert mentioning(server)
        parent.kill()
    deadline = time.monotonic() + 60
    while mentioning(server):
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.05)
