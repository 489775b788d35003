"""A worker: one thread that talks to some replicas, and sleeps while nobody has anything to say."""

import logging
from collections.abc import Callable

from pushrep.push.channel import Channel, Waker
from pushrep.seams import Clock, Network

_LOG = logging.getLogger("pushrep.push")


class Worker(Waker):
    """Runs channels. Thread-safe: `add`, `wake`, `start`, `stop`."""

    def __init__(self, name: str, clock: Clock, network: Network) -> None:
        super().__init__(network)
        self._clock = clock
        self._channels: list[Channel] = []
        self._is_asleep = False
        self._deadline_ms: int | None = None
        self._thread = network.threads.thread(self._run, name)

    def add(self, channel: Channel) -> None:
        """Run it from now on."""
        self._channels.append(channel)
        self.wake()

    def wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self.poller.wake()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, deadline_ms: int) -> None:
        """Say what is to be said until `deadline_ms` at most, hang up everywhere, end the thread."""
        if self._thread.is_alive():
            self._deadline_ms = deadline_ms
            self.poller.wake()
            self._thread.join()
        self.poller.close()

    def _run(self) -> None:
        wake_ms = self._pump()  # what was asked for before the start
        while not self._is_over():
            self._is_asleep = True  # from here on whoever has something to say wakes it
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
            is_ending = channel.is_closing or self._deadline_ms is not None
            if is_ending and channel.is_idle and not channel.say_farewell(self._clock.monotonic_ms()):
                channel.cut()
                self._channels.remove(channel)
                continue
            wake_ms = self._guarded(channel, channel.pump, self._clock.monotonic_ms())
            if wake_ms is not None and (earliest is None or wake_ms < earliest):
                earliest = wake_ms
        return earliest

    def _guarded(self, channel: Channel, act: Callable[[int], int | None], argument: int) -> int | None:
        """A fault of ours costs one connection, not the thread that others share."""
        try:
            return act(argument)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged and the connection made anew
            _LOG.exception("%s: the connection is given up", channel.replica)
            channel.lose()
            return None

    def _timeout_s(self, wake_ms: int | None) -> float | None:
        times = [time for time in (wake_ms, self._deadline_ms) if time is not None]
        return max(0, min(times) - self._clock.monotonic_ms()) / 1000 if times else None

    def _is_over(self) -> bool:
        if self._deadline_ms is None:
            return False
        quiet = all(channel.is_idle or not channel.is_connected for channel in self._channels)
        return quiet or self._clock.monotonic_ms() >= self._deadline_ms
