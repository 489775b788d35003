"""Fixtures and settings of all tests: hypothesis without deadlines (a busy machine is no failure), short and long
forms.

`make torture` sets PUSHREP_TORTURE=1: tests that use the fixture `torture` then run their long forms, those marked
`long` run at all, and hypothesis looks at more examples. The seed stands in the header of the run;
`PUSHREP_TORTURE_SEED=<seed> make torture` repeats it.
"""

import atexit
import faulthandler
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.class_archives import FORKLESS, INTERPRETED, SPARK, java_options
from tests.scopes import Standstill, pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

# Of its own Spark waits 15 s for a Python process to connect, and Python as long for Spark: a busy machine takes more.
# A property of the JVM, not a file in SPARK_CONF_DIR: that stands on the class path, and no archive would fit.
# A query that has nothing to do asks its sources again; every 10 ms, of its own, which keeps a core busy.
_SPARK_WAITS = "-Dspark.python.authenticate.socketTimeout=120s -Dspark.sql.streaming.pollingDelay=200ms"
# Hadoop's local file system starts a `chmod` for each file and directory that it makes, a sixth of a streaming test's
# processor time; now and then one ends with 1 and no word. This one asks Java. It stands at the end of the class path,
# where the archive still fits. Long forms, object stores and other releases of Spark have what users have.
_local_files = Path(__file__).parents[1] / ".cache" / "spark-kafka" / "libs" / "hadoop-bare-naked-local-fs-0.1.0.jar"
_AS_USERS = {"PUSHREP_TORTURE", "PUSHREP_SPARK_PYTHONS", "PUSHREP_STORES_JARS"}
if _local_files.exists() and not _AS_USERS & os.environ.keys():
    os.environ.setdefault("SPARK_DIST_CLASSPATH", str(_local_files))
    _SPARK_WAITS += " -Dspark.hadoop.fs.file.impl=com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
    _SPARK_WAITS += f" {FORKLESS}"
    # By default Spark's JVM listens at a free port, and takes one connection: its Python process's. If another test's
    # server had that port before, a client that still looks for it may connect first. So Spark uses Unix sockets here.
    # They are not below TMPDIR, because a socket's path has 107 characters at most.
    if "JDK_JAVA_OPTIONS" not in os.environ:
        _sockets, _pid = tempfile.mkdtemp(prefix="pushrep-", dir="/tmp"), os.getpid()
        atexit.register(lambda: os.getpid() == _pid and shutil.rmtree(_sockets, ignore_errors=True))  # not in a fork
        _SPARK_WAITS += " -Dspark.python.unix.domain.socket.enabled=true"
        _SPARK_WAITS += f" -Dspark.python.unix.domain.socket.dir={_sockets}"
_archive = Path(__file__).parents[1] / ".cache" / "java" / SPARK
os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", "120")  # for how long Python waits for Spark
os.environ["PUSHREP_TESTS_PYTHON"] = sys.executable  # for tests/worker_python
os.environ["PUSHREP_TESTS_COMMANDS_OF"] = str(os.getpid())  # every test's `pushrep` is a fork of the same
os.environ.setdefault("JDK_JAVA_OPTIONS", f"{java_options(_archive)} {_SPARK_WAITS} {INTERPRETED}")
# Of its own numpy's linear algebra, which nobody calls, starts a thread that looks for work before it sleeps: 50 ms of
# the 200 ms of processor time of numpy's import, in each program that the tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and programs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In a forked child the garbage collector would crash on the parent's Kafka clients, whose threads the child lacks.
os.register_at_fork(after_in_child=gc.disable)

# On a busy machine drawing examples may take a second, too, so its speed is no health check.
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("pushrep", **_NO_CLOCK)
settings.register_profile("torture", **_NO_CLOCK, max_examples=500)
# In CI the same examples and seed each time, so that a red run tells of its change; every other run looks for new ones,
# and for twice as many.
settings.register_profile("ci", **_NO_CLOCK, derandomize=True, max_examples=50)


_STDERR = pytest.StashKey[int]()
_TEARDOWN_S = 120
_SHORT_FORM_S = 900


class Torture(NamedTuple):
    """Whether the tests run in their long form, and the seed of all random choices."""

    is_long: bool
    seed: int

    def count(self, short: int, long: int) -> int:
        return long if self.is_long else short

    def random(self, *salt: object) -> random.Random:
        """A random generator for each test and parameter. salt: distinguishes several generators of one test."""
        return random.Random(f"{self.seed} {salt}")


_TORTURE = Torture(
    is_long=os.environ.get("PUSHREP_TORTURE", "0") not in {"", "0"},
    seed=int(
        os.environ.get("PUSHREP_TORTURE_SEED")
        or (0 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 32))
    ),
)


_IS_SHORT = not _TORTURE.is_long and not _AS_USERS & os.environ.keys()
"""Other releases of Spark and object stores take as long as long forms do."""
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 12 << 30


def _has_room_in_memory():
    if not os.access(_MEMORY, os.W_OK):
        return False
    mounted = os.statvfs(_MEMORY)
    is_for_programs = not mounted.f_flag & os.ST_NOEXEC  # tests make environments and run them
    room_bytes = min(mounted.f_bavail * mounted.f_frsize, psutil.virtual_memory().available)
    return is_for_programs and room_bytes > _ROOM_BYTES


# Nothing of a test is to last, and many small ones wait for a disk more than they work. Tests of disks mount their own,
# and long forms fill gigabytes.
if not _TORTURE.is_long and "TMPDIR" not in os.environ and _has_room_in_memory():
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)


settings.load_profile("torture" if _TORTURE.is_long else "ci" if os.environ.get("CI") else "pushrep")


def pytest_configure(config):
    config.stash[_STDERR] = os.dup(2)  # before a test's output is captured
    if config.getoption("numprocesses", None) and _IS_SHORT:
        config.pluginmanager.register(Standstill(3 * _SHORT_FORM_S))


def pytest_itemcollected(item):
    marked = item.get_closest_marker("timeout")
    if marked and marked.args[0] > _SHORT_FORM_S and _IS_SHORT:
        item.add_marker(pytest.mark.timeout(_SHORT_FORM_S), append=False)  # the mark is for the long form


def pytest_runtest_setup(item):
    if not _TORTURE.is_long and item.get_closest_marker("long"):
        pytest.skip("of the long form: make torture runs it")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """End the process, with what each thread does on its standard error, if a test outlives its own timeout: that is a
    signal, which a call into a library that never returns does not see."""
    marked = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout") or item.config.getini("timeout")
    timeout_s = float(marked.args[0] if marked else given)
    faulthandler.dump_traceback_later(2 * timeout_s + _TEARDOWN_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without garbage collection, which took a sixth of the time in each process: what is made here is kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header():
    from tests import postgresql
    from tests.kafka import broker_processes

    return [
        f"torture: {'long' if _TORTURE.is_long else 'short'} forms, PUSHREP_TORTURE_SEED={_TORTURE.seed}",
        f"Kafka's brokers: {broker_processes.origin()}; PostgreSQL: {postgresql.origin()}",
    ]


@pytest.fixture(scope="session")
def torture():
    return _TORTURE


@pytest.fixture(scope="session")
def postgresql():
    """The URL of this process's PostgreSQL server, which is started once: a test makes databases of its own."""
    from tests.postgresql import running_server

    with running_server() as url:
        yield url


_OF_AN_OPEN_LOG = ("pushrep-linger-", "pushrep-scrub", "pushrep-control", "pushrep-flusher")


@pytest.fixture(autouse=True, scope="module")
def _no_outbox_is_left_open():
    """What a module leaves open makes a later one fail, in an order that is drawn anew each time."""
    before = set(threading.enumerate())
    yield
    left = [one for one in threading.enumerate() if one not in before and one.name.startswith(_OF_AN_OPEN_LOG)]
    for thread in left:
        thread.join(5)  # it may just be ending
    left = [thread.name for thread in left if thread.is_alive()]
    assert left == [], "a test of this module leaves an outbox or a log open"
