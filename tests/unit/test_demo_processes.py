"""Programs are killed with all they started, and nothing stays behind."""

import ctypes
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from examples.demo.processes import Child, ProgramFailed, adopt_orphans, processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and ties children to their parent")

PR_SET_CHILD_SUBREAPER = 36

# A parent, a child in a process group of its own (as Spark's worker daemons), and a grandchild.
FAMILY = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    os.setpgid(0, 0)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
else:
    subprocess.Popen([sys.executable, sys.argv[1]])
print("born", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def orphans_come_to_us():
    adopt_orphans()
    yield
    # Nobody here waits for the orphans of the tests that follow: they would stay as zombies.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def start(tmp_path):
    children = []

    def start(*command):
        child = Child.start(
            "test", [sys.executable, *command], directory=tmp_path, errors=tmp_path / "err", environment=os.environ
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not (got := condition()):
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        time.sleep(0.01)
    return got


def of_session(session):
    return [p for p in processes() if p.session == session]


def test_kill_reaches_every_descendant_and_leaves_no_zombie(start, tmp_path):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    child = start(str(script), str(script))
    wait_for(lambda: len(child.members()) == 3, "three generations")
    assert len({os.getpgid(p.pid) for p in child.members()}) == 2, "one of them moved to another process group"
    dead = child.kill()
    assert len(dead) == 3
    assert child.exit_code() == -9
    assert of_session(child.pid) == [], "no process and no zombie"


def test_lines_are_whole_and_never_waited_for(start):
    child = start("-uc", "import sys, time; sys.stdout.write('one\\ntw'); time.sleep(600)")
    said = []
    wait_for(lambda: said.extend(child.lines()) or said, "the first line")
    assert said == [b"one"]
    assert list(child.lines()) == [], "half a line is held back, and nobody waits for its end"


def test_a_program_that_leaves_by_itself_tells_its_code(start):
    child = start("-c", "print('bye'); raise SystemExit(3)")
    assert wait_for(child.exit_code, "its end") == 3
    assert list(child.lines()) == [b"bye"]
    assert child.kill() == [], "nobody was left to kill"


def test_stop_asks_first(start, tmp_path):
    code = "import signal, time; signal.signal(15, lambda *_: exit(7)); print('ready', flush=True); time.sleep(600)"
    child = start("-c", code)
    wait_for(lambda: list(child.lines()), "its handler")
    child.stop(20)
    assert child.exit_code() == 7


def test_stop_kills_who_doesnt_listen(start):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    child = start("-c", code)
    wait_for(lambda: list(child.lines()), "its deafness")
    child.stop(0.05)
    assert child.exit_code() == -9


def test_a_frozen_program_stands_still_until_thawed(start):
    child = start("-uc", "import time\nwhile True: print('tick'); time.sleep(0.01)")
    wait_for(lambda: list(child.lines()), "a tick")
    child.freeze()
    wait_for(lambda: all(p.state == "T" for p in child.members()), "the stop")
    list(child.lines())
    assert list(child.lines()) == []
    child.thaw()
    wait_for(lambda: list(child.lines()), "a tick after the thaw")


def test_a_child_dies_with_its_parent(start, tmp_path):
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from examples.demo.processes import Child\n"
        "here = Path(sys.argv[1])\n"
        "child = Child.start('c', ['sleep', '600'], directory=here, errors=here / 'e', environment=os.environ)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    supervisor = start(str(parent), str(tmp_path))
    session = int(wait_for(lambda: list(supervisor.lines()), "the inner child")[0])
    wait_for(lambda: any(p.name == "sleep" for p in of_session(session)), "the child to become its program")
    os.kill(supervisor.pid, 9)
    wait_for(lambda: not any(p.alive for p in of_session(session)), "the child's death after kill -9 of its parent")
    for orphan in of_session(session):
        os.waitpid(orphan.pid, 0)


def test_ps_tells_the_same_as_proc(monkeypatch):
    if shutil.which("ps") is None:
        pytest.skip("no ps here")
    (by_proc,) = (p for p in processes() if p.pid == os.getpid())
    monkeypatch.setattr(Path, "exists", lambda _: False)  # /proc
    (by_ps,) = (p for p in processes() if p.pid == os.getpid())
    assert (by_ps.pid, by_ps.parent, by_ps.session) == (by_proc.pid, by_proc.parent, by_proc.session)


def test_a_failure_shows_the_last_words(tmp_path):
    log = tmp_path / "stream.err"
    assert "its last words: nothing" in str(ProgramFailed("stream", 1, log))
    log.write_text("Traceback\n  line 39\nOSError: disk full\n\n")
    assert str(ProgramFailed("stream", 1, log)) == (
        f"the stream ended with exit code 1; its last words: OSError: disk full (all of them: {log})"
    )
