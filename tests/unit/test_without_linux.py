"""Where there is no Linux: what needs no log is imported and works; a log refuses in one sentence. In processes."""

import subprocess
import sys

AWAY = "import sys, os; sys.modules['fcntl'] = None; del os.posix_fallocate, os.fdatasync; "


def run(code):
    return subprocess.run([sys.executable, "-c", AWAY + code], capture_output=True, text=True, timeout=60)


def test_filter_partitioner_and_fake_outbox_work():
    code = """
from filtering import ReplayFilter, StreamMetadata
from partitioner import partition_for
key = StreamMetadata(1, 2, 3).pack()
seen = ReplayFilter()
assert seen.admit(key) and not seen.admit(key) and partition_for(6, 4) == 2
from pushrep import KafkaDestination
from pushrep.testing import FakeOutbox
with FakeOutbox(kafka=KafkaDestination(bootstrap_servers="k:9092")) as outbox:
    assert outbox.append(2, b"v").result() == 0 and outbox.records(2)[0].value == b"v"
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_log_and_an_outbox_refuse_in_one_sentence(tmp_path):
    for code in (
        f"from pushrep import SegmentLog; SegmentLog.open({str(tmp_path / 'orders-0')!r})",
        f"from pushrep import SegmentLog; SegmentLog.open_reader({str(tmp_path / 'orders-0')!r})",
        f"from pushrep import Outbox; Outbox.open({str(tmp_path / 'outbox')!r}, 'orders', 4, 'billing')",
    ):
        done = run(code)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("pushrep.errors.PushrepError: a log is kept on Linux only"), done.stderr
    assert not list(tmp_path.iterdir())
