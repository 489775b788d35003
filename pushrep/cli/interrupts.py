"""Ctrl-C that comes between two steps, not inside of one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def whole_step() -> Iterator[None]:
    """What is inside is done whole; a Ctrl-C meanwhile is raised at its end, a second one at once. Main thread only."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's arguments
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
