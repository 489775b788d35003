"""outbox.lag(): records, bytes and the age of the oldest, for each replica, as the contract demands."""

from pushrep import Acks
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until


def test_lag_holds_records_bytes_and_the_age_of_the_oldest_for_each_replica(world):
    world.node(1)
    world.node(2)
    near, far = (str(world.nodes[index].address) for index in (1, 2))
    with open_outbox(world, 1, 2, partitions=2, acks=Acks.LOCAL) as outbox:
        for number in range(10):
            outbox.append(number % 2, b"both").result(WAIT_S)
        wait_for_all(outbox)
        assert outbox.lag()[far] == (0, 2, 2, 0, 0)
        world.nodes[2].stop()
        size = [outbox.log(n).size_from(0) for n in range(2)]
        for number in range(6):
            outbox.append(number % 2, b"x" * 5000).result(WAIT_S)
        wait_for_all(outbox, near)
        wait_until(lambda: outbox.lag()[far].in_sync == 0, "it left")
        lag = outbox.lag()[far]
        assert lag.records == 6, "it held what it had acknowledged before it went"
        added = sum(outbox.log(n).size_from(0) - size[n] for n in range(2))
        assert 6 * 5000 <= added <= lag.size_bytes <= added + 2 * 4500
        wait_until(lambda: outbox.lag()[far].age_ms >= lag.age_ms + 20, "what it owes grows older")
        assert outbox.lag()[near][:1] + outbox.lag()[near][3:] == (0, 0, 0), "the other is not concerned"
        world.node(2)
        wait_for_all(outbox)
        assert outbox.lag()[far] == (0, 2, 2, 0, 0)


def test_a_replica_that_was_never_there_owes_everything(world):
    world.node(1)
    world.nodes[1].stop()
    with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
        for _ in range(5):
            outbox.append(0, b"alone").result(WAIT_S)
        (lag,) = outbox.lag().values()
        assert (lag.records, lag.in_sync, lag.size_bytes) == (5, 0, outbox.log(0).size_from(0))
        assert lag.age_ms >= 0
