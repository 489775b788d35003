"""Shipping goes with the lead (standby.md, identity.md T3): leaders are killed and stopped in turn, a reader judges."""

import signal
import threading
from contextlib import ExitStack

import pytest

from tests.crash.test_orders_ha_example import report_of
from tests.crash.test_standby_kill import Machines, kill_a_runner, rounds_of_faults
from tests.kafka.dump_tool import dump_segments
from tests.kafka.plain_client import consume, create_topic, delete_topic
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]
TOPIC = "shipped-by-who-leads"
SOURCE = 4711


def test_each_record_is_once_in_the_topic_and_no_two_ship_at_one_time(broker, tmp_path):
    """kill -9, then SIGSTOP beyond the limit with a return, then kill -9 of who leads; each appends on where the one
    before it was. The stopped one has batches on the way, and finds another instance at the topic.
    """
    create_topic(broker.bootstrap_servers, TOPIC)
    with ExitStack() as stack:
        machines = Machines(tmp_path, stack, ships_to=(broker.bootstrap_servers, TOPIC))
        for index in range(3):
            machines.run(index)
        machines.create()
        for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            leader = machines.leader()
            machines.services[leader].wait_for_more("acked", 100)
            if how is signal.SIGKILL:
                machines.kill_service(leader)
                assert machines.leader() != leader
                machines.run(leader)
                continue
            machines.services[leader].process.send_signal(how)
            machines.services[machines.leader()].wait_for_more("acked", 100)
            machines.services[leader].process.send_signal(signal.SIGCONT)
            machines.services[leader].wait_for("deposed")
        leader = machines.leader()
        machines.services[leader].wait_for_more("acked", 100)
        machines.finish(leader)
    assert len(machines.led) > 3
    judge(broker, TOPIC, machines)


def judge(broker, topic, machines):
    """Judge by the topic, read through a filter, and by Kafka's tool on the broker's files."""
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    values = [int(seen.value) for seen in found.of(SOURCE, 0)]
    assert values == list(range(len(values)))
    assert set(machines.acked.values()) <= set(values)
    (dump,) = dump_segments(broker.log_directory() / f"{topic}-0")
    shippers = [(int(batch["producerId"]), int(batch["producerEpoch"])) for batch in dump.batches]
    assert shippers == sorted(shippers), "an instance wrote behind one that had fenced it"
    assert len(set(shippers)) > 1


def test_rounds_of_faults_leave_each_record_once_in_the_topic(broker, tmp_path, torture):
    if not torture.is_long:
        pytest.skip("the test above is the short form")
    create_topic(broker.bootstrap_servers, "shipped-in-rounds")
    with ExitStack() as stack:
        machines = Machines(tmp_path, stack, ships_to=(broker.bootstrap_servers, "shipped-in-rounds"))
        print(rounds_of_faults(machines, torture.random("shipped"), 60))  # noqa: T201 - for who ran it
    judge(broker, "shipped-in-rounds", machines)


def test_the_lines_of_a_command_are_once_in_the_topic(broker, tmp_path, torture):
    """`pushrep outbox run --bootstrap-servers`, killed with -9: the next one ships what the first had not."""
    if not torture.is_long:
        pytest.skip("tests/crash/test_standby_kill.py kills a runner, and the test above a leader that ships")
    create_topic(broker.bootstrap_servers, "orders")
    try:
        with ExitStack() as stack:
            options = ("--bootstrap-servers", broker.bootstrap_servers)
            _, acked = kill_a_runner(Machines(tmp_path, stack), *options)
            pause, lines = threading.Event(), []
            while not lines or lines[-1] < max(acked.values()):
                pause.wait(1)
                lines = [int(seen.value) for seen in consume(broker.bootstrap_servers, "orders", 0)]
                assert lines == list(range(1, len(lines) + 1))
    finally:
        delete_topic(broker.bootstrap_servers, "orders")


def test_the_examples_orders_are_once_in_the_topic_and_in_the_table(broker, tmp_path):
    try:
        said = report_of(tmp_path / "world", 1, "--kafka", broker.bootstrap_servers)
    finally:
        delete_topic(broker.bootstrap_servers, "orders")
    assert "the same, each once and in order" in said
