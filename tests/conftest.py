"""What all tests share: hypothesis without a clock (a busy machine is no fault of the code), short and long forms.

`make torture` sets PUSHREP_TORTURE=1: tests that use the fixture `torture` then run their long forms, and hypothesis
looks at more examples. The seed stands in the header of the run; `PUSHREP_TORTURE_SEED=<seed> make torture` repeats it.
"""

import gc
import os
import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.class_archives import SPARK, java_options

os.environ.setdefault("JDK_JAVA_OPTIONS", java_options(Path(__file__).parents[1] / ".cache" / "java" / SPARK))

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and programs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A child that collects what its parent left behind falls over Kafka's clients, whose threads it does not have.
os.register_at_fork(after_in_child=gc.disable)

# Also what draws examples may stand still for a second: that they are drawn fast is no promise.
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("pushrep", **_NO_CLOCK)
settings.register_profile("torture", **_NO_CLOCK, max_examples=500)
# In CI the same examples and seed each time, so that a red run tells of its change; every other run looks for new ones.
settings.register_profile("ci", **_NO_CLOCK, derandomize=True)


class Torture(NamedTuple):
    """Whether this is the long form, and the seed of whatever is drawn."""

    is_long: bool
    seed: int

    def count(self, short: int, long: int) -> int:
        return long if self.is_long else short

    def random(self, *salt: object) -> random.Random:
        """A source of its own for each test and parameter: `salt` tells them apart."""
        return random.Random(f"{self.seed} {salt}")


_TORTURE = Torture(
    is_long=os.environ.get("PUSHREP_TORTURE", "0") not in {"", "0"},
    seed=int(
        os.environ.get("PUSHREP_TORTURE_SEED")
        or (0 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 32))
    ),
)


settings.load_profile("torture" if _TORTURE.is_long else "ci" if os.environ.get("CI") else "pushrep")


# What starts one Spark, or brokers, for all its tests stays together when several processes share the work.
_TOGETHER = {"spark", "kafka"}


class Rooms(LoadScopeScheduling):
    """Which tests one process takes at once: a file, and all of Spark's and of the brokers' tests."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        room = path.split("/")[1]
        return room if room in _TOGETHER else path


def pytest_xdist_make_scheduler(config, log):
    return Rooms(config, log)


def pytest_report_header():
    from tests import postgresql
    from tests.kafka import broker_processes

    return [
        f"torture: {'long' if _TORTURE.is_long else 'short'} forms, PUSHREP_TORTURE_SEED={_TORTURE.seed}",
        f"Kafka's brokers: {broker_processes.road()}; PostgreSQL: {postgresql.road()}",
    ]


@pytest.fixture(scope="session")
def torture():
    return _TORTURE
