"""The simulated network keeps the promises of a network, and breaks just what a seed says."""

import pytest

from pushrep.seams import REAL_NETWORK
from pushrep.testing import SimulatedClock
from pushrep.testing.network_examiner import examine_network
from pushrep.testing.simulated_network import SimulatedNetwork


def test_the_real_network_passes_the_examiner():
    examine_network(REAL_NETWORK, "127.0.0.1")


@pytest.mark.parametrize("seed", range(20))
def test_the_simulated_network_passes_the_examiner(seed):
    network = SimulatedNetwork(seed, SimulatedClock())
    examine_network(network.machine("a").start(), "a")
