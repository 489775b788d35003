"""Appends that their callers left to another thread: who has the turn to sync writes for all who came meanwhile.

    A  hands over, takes the turn ─ writes A ─ syncs ─┐
    B  hands over, sleeps ────────────────────────────┤ C  takes the turn ─ writes B, C, D ─ syncs ─┐ all go
    C  hands over, sleeps ────────────────────────────┤                                             │
    D  hands over, sleeps ────────────────────────────┘─────────────────────────────────────────────┘

A caller that wrote by itself would take the log's lock and the interpreter's for each record, against all others.

Only for threads that Ctrl-C can't reach: interrupted between two of its steps, a thread would leave what others gave it
neither written nor refused. Python interrupts none but the main thread.
"""

from collections.abc import Callable, Sequence
from threading import get_ident, main_thread

from pushrep.log.config import AppendResult
from pushrep.records import RecordBatch


class HandedOver:
    """One caller's batches, and where they went or why they did not; neither is known at first."""

    __slots__ = ("batches", "error", "result")

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self.batches = batches
        self.result: AppendResult | None = None
        self.error: BaseException | None = None

    def written(self) -> None:
        """They stand where they were stamped to."""
        self.result = AppendResult(self.batches[0].header.base_offset, self.batches[-1].header.next_offset - 1)

    def answer(self) -> AppendResult:
        """Where they went. Raises why they did not."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise AssertionError("asked before anybody wrote")
        return self.result


def may_be_interrupted() -> bool:
    """Whether this thread is the one that gets Ctrl-C."""
    return get_ident() == main_thread().ident


def write_each(handed: Sequence[HandedOver], write: Callable[[Sequence[RecordBatch]], None]) -> None:
    """Write what was handed over in one go; if that fails, one by one, so that each gets its own answer.

    `write` writes all it is given or nothing. Raises nothing: what it raised is the answer.
    """
    try:
        write([batch for one in handed for batch in one.batches])
    except BaseException as error:  # noqa: BLE001 - who handed over would wait for ever, whatever it was
        for one in handed:
            if len(handed) > 1:
                write_each([one], write)
            else:
                one.error = error
    else:
        for one in handed:
            one.written()
