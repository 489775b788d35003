"""A public class name means one thing in the product, imports make no circle, and tests use what is public."""

from tests.house.figures import OF_OTHERS, circles, double_names, private_members


def test_no_public_class_name_has_two_meanings():
    assert not double_names()


def test_modules_import_each_other_in_no_circle():
    assert not circles()


RULES_BROKEN = "a rule of elections or pushes that a simulation breaks, to be caught"
PRIVATE = {
    "_before": RULES_BROKEN,
    "_from_log": RULES_BROKEN,
    "_on_look": RULES_BROKEN,
    "_DONE_BY": RULES_BROKEN,
    "_changing": "held, so that an outbox looks for its members only after another one leads",
    "_commit": "fails between the last statement of a batch and the commit, inside of the transaction",
    "_facts": "whom the coordinator names as a partition's holder; nothing else says it without Kafka's reassignment",
    "_member": "where a program that is killed stands, without waiting for its next commit",
    "_moving": "held, so that a call is cancelled between a fetched record and the partitions that come",
    "_pushes": "when a watermark went alone last, which is hours ago in the test",
    "_resources": "what the end of a process frees, behind a close that ran out of time",
    "_signals": "a job runs beside others in a thread, where Python lets nobody handle signals",
    "_stopping": "that a leader which resigned has begun to end its shipping",
    "_thread": "that a closed outbox has left no thread that waits for a broker",
}


def test_tests_name_no_private_member_but_these():
    """Tests name only public members of the product, and those in PRIVATE, which has no name that no test uses."""
    found = {name: where for name, where in private_members().items() if name not in OF_OTHERS}
    assert found.keys() == PRIVATE.keys(), {name: found.get(name) for name in found.keys() ^ PRIVATE.keys()}
