"""A clock that stands until it is told to go on."""


class SimulatedClock:
    """Both of `Clock`'s times; `advance` moves them, `set_wall` lets the wall clock jump, as real ones do."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms, self._monotonic_ms = wall_ms, 0

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Let `ms` pass on both clocks."""
        if ms < 0:
            raise ValueError(f"time does not go back: advance({ms})")
        self._wall_ms += ms
        self._monotonic_ms += ms

    def set_wall(self, wall_ms: int) -> None:
        """Set the wall clock, back too; durations do not see it."""
        self._wall_ms = wall_ms
