"""How many startpoints are in each state, for Prometheus: REGISTRY.register(StartpointCollector(store))."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.startpoints.model import State
from pushrep.startpoints.store import StartpointStore
from pushrep.status.metrics import Families


class StartpointCollector(Collector):
    """How many startpoints of a store are in each state. The store is read at each scrape."""

    def __init__(self, store: StartpointStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One family with a sample for each state. Raises the errors of `StartpointStore.event_log`."""
        event_log, states = self._store.event_log(), Counter[State]()
        for written in event_log.all_written():
            readers = event_log.readers(written.sequence).values()
            states.update([one.state for one in readers] or [event_log.state(written.sequence)])
        families = Families()
        for state in State:
            families.add("pushrep_startpoints", {"state": state.value}, states[state])
        return families
