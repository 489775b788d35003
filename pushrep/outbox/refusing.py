"""Refusal before any lock: what stands in for the appenders of an outbox that was closed, or forked.

In a forked child there are no writers, and any lock may have been held at the moment of the fork: so a child must be
refused before it takes one, and without a price for the hot path.
"""

import os
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

from pushrep.outbox.partition_appender import PartitionAppender


class Disownable(Protocol):
    """Something that a fork of its owner must not use."""

    def disown(self) -> None:
        """From now on, every use raises `ForkedProcess`."""
        ...


class RefusingAppenders(dict[int, PartitionAppender]):
    """Every look-up raises what `refusal()` makes."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        super().__init__()
        self._refusal = refusal

    def __getitem__(self, partition: int) -> PartitionAppender:
        raise self._refusal()

    def values(self) -> NoReturn:
        raise self._refusal()


class Refusing:
    """Every attribute is what `refusal()` makes, raised."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


_OPEN: "weakref.WeakSet[Disownable]" = weakref.WeakSet()


def refuse_in_forks(owned: Disownable) -> None:
    """In every later fork of this process, `owned.disown()` is called before anything else runs there."""
    _OPEN.add(owned)


def _after_fork_in_child() -> None:
    for owned in list(_OPEN):
        owned.disown()


os.register_at_fork(after_in_child=_after_fork_in_child)
