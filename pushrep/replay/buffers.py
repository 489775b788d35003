"""Memory that is read into again and again: new pages cost more than what is read into them.

take ─▶ a view ─▶ views of its parts ─▶ ... ─▶ the last one is dropped        free: nobody has to give it back
"""

import threading

import numpy as np

_KEPT_MAX = 6
"""What a block of a local replay is made of, and one more."""
_ALIGNMENT = 64
"""Bytes of a processor's cache line. The kernel's copy to where none begins takes a third longer."""


class Buffers:
    """Buffers of `size_bytes`. Thread-safe. Who holds a view keeps its buffer, however many others come meanwhile."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._kept: list[tuple[bytearray, int]] = []
        self._lock = threading.Lock()

    def acquire(self) -> memoryview:
        """All of one that nobody looks into; what is in it is left from before. Never waits."""
        kept = self.acquire_kept()
        if kept is not None:
            return kept
        buffer, begin = made = self._made()
        if self._lock.acquire(blocking=False):  # else, a moment later, or in a fork never: one that is not kept
            self._kept = [*self._kept[1:], made]
            self._lock.release()
        return self._view(buffer, begin)

    def acquire_kept(self) -> memoryview | None:
        """The same, but None if somebody looks into each of as many as are kept: for who has another way."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for number, (buffer, begin) in enumerate(self._kept):
                try:
                    buffer.append(buffer.pop())  # a view of it forbids that
                except BufferError:
                    continue
                self._kept.append(self._kept.pop(number))
                return self._view(buffer, begin)
            if len(self._kept) >= _KEPT_MAX:
                return None
            self._kept.append(self._made())
            return self._view(*self._kept[-1])
        finally:
            self._lock.release()

    def _made(self) -> tuple[bytearray, int]:
        made = bytearray(self._size_bytes + _ALIGNMENT)
        return made, -np.frombuffer(made, np.uint8).ctypes.data % _ALIGNMENT

    def _view(self, buffer: bytearray, begin: int) -> memoryview:
        return memoryview(buffer)[begin : begin + self._size_bytes]


class KeptBuffers:
    """For bodies of frames: who keeps many small ones keeps no whole buffer for each."""

    def __init__(self, size_bytes: int) -> None:
        self._buffers = Buffers(size_bytes)

    def acquire(self) -> memoryview | None:
        """See `Buffers.take_kept`."""
        return self._buffers.acquire_kept()

    def give_back(self, _buffer: object, /) -> None:
        """It came back when its last view was dropped."""
