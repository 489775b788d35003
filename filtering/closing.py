"""The end of a `with` block, for everything that has a `close`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TypeVar


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


class FirstErrorRaised(ClosedAtExit):
    """As ClosedAtExit; if the block raised, an error of `close` is a note of that one."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and closing the {type(self).__name__}: {failure}")


class Closable(Protocol):
    """What `closed_on_error` closes."""

    def close(self) -> object: ...


def close_all(closes: Iterable[Callable[[], object]]) -> None:
    """Call each of them, in order, also after an error. Raises the first error; the others are notes of it."""
    first: Exception | None = None
    for close in closes:
        try:
            close()
        except Exception as error:  # noqa: BLE001 - raised below
            if first is None:
                first = error
            else:
                first.add_note(f"and then: {error}")
    if first is not None:
        raise first


_Closable = TypeVar("_Closable", bound=Closable)


@contextmanager
def closed_on_error(one: _Closable) -> Iterator[_Closable]:
    """It is closed if the block raises; else it stays open."""
    try:
        yield one
    except BaseException:
        one.close()
        raise
