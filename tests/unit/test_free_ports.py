"""Ports of brokers in tests and demos: kept for a broker also while it is killed and away."""

import socket
from contextlib import ExitStack

import pytest

from tests.support.kafka_node import free_ports


def test_a_reserved_port_is_its_brokers_and_nobody_elses_until_it_is_given_back():
    with ExitStack() as reserved:
        [port] = free_ports(1, reserved)
        for _ in range(2):  # killed and started again
            broker = socket.create_server(("127.0.0.1", port))  # as Java's, it allows others that never listen
            with broker, socket.create_connection(("127.0.0.1", port), 30), broker.accept()[0]:
                pass
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 30)


def test_ports_differ_and_lie_below_those_of_connections():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(15_000 <= port < 32_000 for port in ports)
