"""How the processes of a test run share the work (a plugin of pytest-xdist), and how a run ends that stands still.

A scope is a file, or the files that share one Spark, which takes its time to start. A broker starts within seconds:
each process that wants one has its own.
"""

import os
import signal
import threading
from contextlib import suppress

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

SCOPES = {
    "tests/house/test_budget.py": "the product's text",  # which is parsed once
    "tests/house/test_names.py": "the product's text",
    "tests/house/test_troubles.py": "the product's text",
    # The files that use the fixture of this name.
    "tests/kafka/test_relay_job.py": "spark_driver",
    "tests/kafka/test_relay_refusals.py": "spark_driver",
    "tests/kafka/test_rights.py": "spark_driver",
    "tests/kafka/test_source_topics.py": "spark_driver",
    "tests/kafka/test_spark_kafka_source.py": "spark_driver",
    "tests/kafka/test_leaderless.py": "three_brokers",
    "tests/kafka/test_shipping_kills.py": "three_brokers",
}
_PROGRAMS = {  # each with a Spark of its own
    "tests/spark/test_demo.py",
    "tests/spark/replay/test_apply_process.py",
}
# In which order they begin: the long ones first, so that none is left alone at the end; between those that start JVMs
# the unit tests, which fail early; between those that wait for brokers what computes. What is not named here is short,
# and comes last.
_ORDER = (
    "tests/spark/replay",
    "tests/kafka/test_demo_kafka.py",
    "tests/unit/",
    "tests/spark",
    ("tests/house/", "the product's text"),
    "spark_driver",
    "three_brokers",
    ("tests/kafka/", "tests/crash/", "tests/properties/", "tests/simulation/", "tests/readers/"),
    "tests/tables/",
    "tests/integration/test_standbys.py",  # the longest of these
    "tests/integration/",
)


def _scope(nodeid):
    path = nodeid.partition("::")[0]
    if path.startswith("tests/spark/") and path not in _PROGRAMS:
        return path.rpartition("/")[0]
    return SCOPES.get(path, path)


def _turn(scope):
    return next((n for n, begin in enumerate(_ORDER) if scope.startswith(begin)), len(_ORDER))


def _directory(scope):
    return scope.rpartition("/")[0] or "tests/kafka"


class Scopes(LoadScopeScheduling):
    """Hands out scopes in the order of the collection."""

    def __init__(self, config, log):
        config.option.loadscopereorder = False  # that goes by the number of tests, which says little of their time
        super().__init__(config, log)

    def mark_test_complete(self, node, item_index, duration=0):
        """A process stays in its directory while there is more of it to do in this turn: a broker that its tests share
        rests whenever it goes to another one, and takes seconds to be woken."""
        if self.workqueue:
            turn, here = _turn(next(iter(self.workqueue))), _directory(next(reversed(self.assigned_work[node])))
            near = (one for one in self.workqueue if _turn(one) == turn and _directory(one) == here)
            self.workqueue.move_to_end(next(near, next(iter(self.workqueue))), last=False)
        super().mark_test_complete(node, item_index, duration)

    def _split_scope(self, nodeid):
        return _scope(nodeid)

    def remove_node(self, node):
        """The test in which a process ended is reported as failed, and what it left goes to the others.

        xdist would run that test again, which ends the next process; and it would hand out again what is done, of which
        nothing is sent: a process that has one test left waits for more before it runs that, so this one never ended.
        """
        work = self.assigned_work[node]
        test = next((test for unit in work.values() for test, is_done in unit.items() if not is_done), None)
        if test:
            work[_scope(test)][test] = True
        self.assigned_work[node] = {scope: unit for scope, unit in work.items() if not all(unit.values())}
        super().remove_node(node)
        return test

    def _reschedule(self, node):
        """xdist hands out one scope, and the next one when a test of it is done: of a single test none ever is. And it
        asks new processes that have not collected yet."""
        if node not in self.registered_collections:
            return
        with suppress(OSError):  # it has just ended, and `remove_node` follows
            super()._reschedule(node)
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)


class Standstill:
    """Ends a run of several processes in which no test began or ended for `limit_s`, with what each process does.

    A test's own timeout does not see a process that waits for its next test, nor one that ended unnoticed.
    """

    def __init__(self, limit_s):
        self._limit_s = limit_s
        self._running = set()
        self._heard = threading.Event()

    def pytest_sessionstart(self):
        threading.Thread(target=self._watch, args=[os.dup(2)], daemon=True, name="standstill").start()

    def pytest_runtest_logstart(self, nodeid):
        self._running.add(nodeid)
        self._heard.set()

    def pytest_runtest_logfinish(self, nodeid):
        self._running.discard(nodeid)
        self._heard.set()

    def _watch(self, stderr):
        while self._heard.wait(self._limit_s):
            self._heard.clear()
        running = " ".join(sorted(self._running)) or "no test"
        os.write(stderr, f"\nno test began or ended for {self._limit_s} s; running: {running}\n".encode())
        processes = psutil.Process().children(recursive=True)
        for one in psutil.Process().children():
            one.send_signal(signal.SIGABRT)  # pytest has it say what each thread does
        psutil.wait_procs(processes, timeout=10)
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        os._exit(pytest.ExitCode.INTERNAL_ERROR)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # one process of several
        items.sort(key=lambda item: _turn(_scope(item.nodeid)))


def pytest_xdist_make_scheduler(config, log):
    return Scopes(config, log)
