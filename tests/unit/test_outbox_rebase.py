"""Which records a rebase appends again: a table over what the topic holds of a log of 100 records."""

from types import SimpleNamespace

import pytest

from pushrep.kafka.progress import OffsetRanges
from pushrep.outbox.rebase import appended_again

#   held, contested, the first that is not known to be held, skipped    -> appended again
CASES = {
    "nothing is known to be there": ([], [], 0, [], [(0, 100)]),
    "the rest is not there": ([(0, 40)], [], 40, [], [(40, 100)]),
    "another's records, then nothing": ([], [(40, 60)], 40, [], [(40, 100)]),
    "another's records came first, ours behind them": ([(60, 100)], [(40, 60)], 100, [], [(40, 60)]),
    "another's records behind a head that was cut": ([], [(50, 60)], 40, [], [(40, 100)]),
    "a head that was cut, then ours": ([(30, 70)], [], 0, [], [(70, 100)]),
    "one of ours behind another's proves nothing of those before": ([(80, 81)], [(50, 60)], 40, [], [(40, 100)]),
    "what was given up stays so": ([], [(40, 60)], 40, [(40, 45), (99, 100)], [(45, 99)]),
    "all is there": ([(0, 100)], [], 100, [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_readers_of_the_topic_do_not_see_is_appended_again(name):
    """identity T4: "what the topic does not hold is appended again"."""
    held, contested, first, skipped, expected = CASES[name]
    contents = SimpleNamespace(
        progress=SimpleNamespace(skipped_of=lambda _: OffsetRanges(skipped)),
        held={0: OffsetRanges(held)},
        contested={0: OffsetRanges(contested)},
        first={0: first},
    )
    assert list(appended_again(contents, 0, 100)) == expected
