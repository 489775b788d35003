"""Time comes through the door: two clocks that must never be mixed."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what people and records read; monotonic time for every duration and deadline."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump back."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some moment of this process's own; never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """CLOCK_MONOTONIC in milliseconds."""
        return time.monotonic_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
