"""An outbox without `close`: at the end of the program, whether it is still referenced or not."""

import subprocess
import sys

import pytest

from pushrep.log import LogLocked, SegmentLog
from pushrep.outbox import Outbox, OutboxConfig

OPEN = """from pushrep import Outbox, OutboxConfig
outbox = Outbox.open({path!r}, topic='orders', partitions=2, producer='p', {more})
"""


def run(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def held(path, partition=0):
    with SegmentLog.open_reader(path / f"orders-{partition}") as log:
        return [record.value for record in log.records(0)]


def open_outbox(path):
    return Outbox.open(path, topic="orders", partitions=2, producer="p", config=OutboxConfig(linger_ms=3_600_000))


LINGERING = "config=OutboxConfig(linger_ms=3_600_000)"
ENDINGS = {
    "the script ends": "",
    "sys.exit": "import sys; sys.exit(3)",
    "an error": "raise ValueError('mine')",
    "in a function": "def main():\n    kept = outbox\nmain(); del main",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_appended_is_there_when_the_program_has_ended(tmp_path, ending):
    path = tmp_path / "outbox"
    append = "for n in range(1000): outbox.append(0, b'%d' % n)\n"
    done = run(OPEN.format(path=str(path), more=LINGERING) + append + ENDINGS[ending], tmp_path)
    assert done.returncode == {"sys.exit": 3, "an error": 1}.get(ending, 0)
    assert f"the outbox in {path} was still open when the program ended" in done.stderr
    assert "1000 records" in done.stderr
    assert len(held(path)) == 1000
    with SegmentLog.open(path / "orders-0") as log:
        assert log.recovery.opening.value == "normal", "it was closed, not only written"


@pytest.mark.parametrize("kept", ["in the module", "in the function"])
def test_a_child_of_multiprocessing_closes_what_it_forgot(tmp_path, kept):
    """The child ends by os._exit, which does not run atexit functions."""
    code = f"""
import multiprocessing
from pushrep import Outbox, OutboxConfig

def work():
    {"global outbox" if kept == "in the module" else "pass"}
    config = OutboxConfig(linger_ms=3_600_000)
    outbox = Outbox.open_slot({str(tmp_path / "o")!r}, "orders", 1, "p", slots=2, config=config)
    for n in range(1000):
        outbox.append(0, b"%d" % n)

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert "1000 records" in done.stderr
    assert len(held(tmp_path / "o" / "slot-0")) == 1000


def test_a_closed_one_says_nothing(tmp_path):
    done = run(OPEN.format(path=str(tmp_path / "a"), more="") + "outbox.append(0, b'1')\noutbox.close()", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_disk_that_does_not_answer_ends_the_wait_at_its_limit(tmp_path):
    stuck = """
import threading
from pushrep.env import RealFilesystem
class Stuck(RealFilesystem):
    def open(self, path, **how):
        file = super().open(path, **how)
        return File(file) if path.suffix == ".log" else file
class File:
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def sync(self): threading.Event().wait()
"""
    more = "config=OutboxConfig(close_timeout_s=0.2), filesystem=Stuck()"
    code = stuck + OPEN.format(path=str(tmp_path / "a"), more=more) + "outbox.append(0, b'1')"
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert "and 1 records waited" in done.stderr
    assert "close_timeout_s=0.2" in done.stderr


def test_a_fork_that_ends_closes_nothing_of_its_parents(tmp_path):
    path = tmp_path / "outbox"
    code = OPEN.format(path=str(path), more=LINGERING) + (
        "import os\noutbox.append(0, b'a')\npid = os.fork()\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0; outbox.append(0, b'b'); outbox.close()"
    )
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert held(path) == [b"a", b"b"]


def test_a_program_that_drops_it_and_ends_at_once_waits_for_it(tmp_path):
    path = tmp_path / "outbox"
    code = OPEN.format(path=str(path), more=LINGERING) + "outbox.append(0, b'a')\ndel outbox\nimport gc; gc.collect()"
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert "was still open when the program ended: closed now, with 1 records" in done.stderr
    assert held(path) == [b"a"]
    with SegmentLog.open(path / "orders-0") as log:
        assert log.recovery.opening.value == "normal"


def test_a_lock_of_this_very_process_says_so(tmp_path):
    with open_outbox(tmp_path), pytest.raises(LogLocked, match="in this very process") as refused:
        open_outbox(tmp_path)
    assert refused.value.is_own
