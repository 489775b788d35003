"""The end of a `with` block, for everything that has a `close`."""

from types import TracebackType
from typing import Self


class ClosedAtExit:
    """A context manager: it is itself in the block, and closed at the block's end, whatever ended it."""

    __slots__ = ()

    def close(self) -> None:
        """Release what it holds. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
