"""Workers: a few threads that talk to replicas, and sleep while there is nothing to send.

All PushManagers of a process share them (`workers_for`), so that twenty outboxes have no more threads than one. With a
simulated network or clock each manager has its own, so that a run is repeatable.
"""

import logging
from collections.abc import Callable
from operator import attrgetter

from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK, Clock, Network, shared_by_process
from pushrep.replicate.channel import Channel, Waker
from pushrep.replicate.settings import PushSettings

_LOG = logging.getLogger("pushrep.push")


class PushWorker(Waker):
    """Runs channels of any manager. Thread-safe: `add`, `wake`, `start`, `stop`."""

    def __init__(self, name: str, clock: Clock, network: Network) -> None:
        super().__init__(network)
        self._clock = clock
        self._channels: list[Channel] = []
        self._is_asleep = False
        self._is_stopping = False
        self._thread = network.threads.thread(self._run, name)

    @property
    def load(self) -> int:
        """How many channels it runs."""
        return len(self._channels)

    def add(self, channel: Channel) -> None:
        """Run it from now on, until it is closed."""
        self._channels.append(channel)
        self.wake()

    def wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self.poller.wake()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; channels that are not closed yet hang up."""
        if self._thread.is_alive():
            self._is_stopping = True
            self.poller.wake()
            self._thread.join()
        self.poller.close()

    def _run(self) -> None:
        wake_ms = self._pump()  # channels that were woken before the start
        while not self._is_stopping:
            self._is_asleep = True  # from here on `wake` has to end the wait
            can_send = any(channel.can_send() for channel in self._channels)
            timeout_s = 0.0 if can_send else self._timeout_s(wake_ms)
            ready = self.poller.select(timeout_s)
            self._is_asleep = False
            for channel, mask in ready:
                self._guarded(channel, channel.on_io, mask)
            wake_ms = self._pump()
        for channel in self._channels:
            channel.cut()

    def _pump(self) -> int | None:
        earliest: int | None = None
        for channel in list(self._channels):
            now_ms = self._clock.monotonic_ms()
            wake_ms = None if channel.is_done(now_ms) else self._guarded(channel, channel.pump, now_ms)
            if channel.is_done(now_ms):
                channel.cut()
                self._channels.remove(channel)
                continue
            if wake_ms is not None and (earliest is None or wake_ms < earliest):
                earliest = wake_ms
        return earliest

    def _guarded(self, channel: Channel, act: Callable[[int], int | None], argument: int) -> int | None:
        """Call `act`; a bug in it costs one connection, not the shared thread."""
        try:
            return act(argument)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged and the connection made anew
            _LOG.exception("%s: the connection is given up", channel.replica)
            channel.lose()
            return None

    def _timeout_s(self, wake_ms: int | None) -> float | None:
        return None if wake_ms is None else max(0, wake_ms - self._clock.monotonic_ms()) / 1000


class Workers:
    """The workers of one manager, or of all managers of a process."""

    def __init__(self, count: int, clock: Clock, network: Network) -> None:
        self._workers = [PushWorker(f"pushrep-push-{n}", clock, network) for n in range(count)]
        self._is_started = False

    def start(self) -> None:
        """Begin. Once is enough."""
        if not self._is_started:
            self._is_started = True
            for worker in self._workers:
                worker.start()

    def least_loaded(self) -> PushWorker:
        """The worker for the next channel."""
        return min(self._workers, key=attrgetter("load"))

    def stop(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.stop()


_OF_PROCESS = shared_by_process(Workers.stop)


def workers_for(settings: PushSettings, clock: Clock) -> Workers:
    """The Workers shared by all managers with as many workers. Each call needs a `release_workers`."""
    if settings.network is not REAL_NETWORK or clock is not SYSTEM_CLOCK:
        return Workers(settings.max_workers, clock, settings.network)
    return _OF_PROCESS.acquire(settings.max_workers, lambda: _started(settings, clock))


def release_workers(workers: Workers) -> None:
    """Release them, after closing their channels; the threads end with the last manager."""
    if not _OF_PROCESS.release(workers):
        workers.stop()


def _started(settings: PushSettings, clock: Clock) -> Workers:
    workers = Workers(settings.max_workers, clock, settings.network)
    workers.start()
    return workers
