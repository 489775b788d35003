"""AsyncOutbox: an Outbox for tasks of asyncio or uvloop. A call that waits suspends its task, never the loop.

    receipt = await outbox.append(...)       offset = await receipt

`append` suspends while the buffer is full, and for one turn of the loop after 128 appends in a row.
Appending runs in the loop's thread: it takes a microsecond and never touches the disk. The outbox's own threads write;
batch.py brings their answers into the loop. Each call that opens, closes or flushes runs in a thread of its own.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import copy_context
from functools import partial, wraps
from inspect import signature
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from filtering import StreamMetadata
from pushrep.errors import BadArgument, PushrepError
from pushrep.outbox.batch import Receipt, call_in_loop
from pushrep.outbox.errors import BufferFull
from pushrep.outbox.outbox import MISSING, Outbox

_APPENDS_IN_A_ROW = 128  # then other tasks run: a loop over `append` never suspends by itself while memory is free
_NOT_OPEN = (
    "{}: the outbox is not open yet: write `await AsyncOutbox.open(...)` or "
    "`async with AsyncOutbox.open(...) as outbox:`"
)

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


class OpeningOutbox:
    """An AsyncOutbox that is being opened in a thread: `await` it, or `async with` it."""

    def __init__(self, open_outbox: Callable[[], Outbox], cancel: threading.Event | None = None) -> None:
        """cancel: set when no task waits for it any more."""
        self._open_outbox, self._cancel = open_outbox, cancel
        self._opened: AsyncOutbox | None = None

    def __await__(self) -> "Generator[Any, None, AsyncOutbox]":
        return self._run().__await__()

    async def _run(self) -> "AsyncOutbox":
        opening = asyncio.ensure_future(_in_thread(self._open_outbox))
        try:
            return AsyncOutbox(await asyncio.shield(opening))
        except asyncio.CancelledError:
            if self._cancel is not None:
                self._cancel.set()
            opening.add_done_callback(_close_unwanted)
            raise

    def __getattr__(self, name: str) -> Any:
        """Raises an AttributeError that says to await the outbox first."""
        raise AttributeError(_NOT_OPEN.format(name), name=name)  # no `obj`: nothing is to be suggested

    async def __aenter__(self) -> "AsyncOutbox":
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, traceback)


def _close_unwanted(opening: "asyncio.Future[Outbox]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="pushrep-async", daemon=True).start()


def _opened_in_thread(open_outbox: Callable[_Args, Outbox]) -> Callable[_Args, OpeningOutbox]:
    """The same call, whose answer is awaited. Cancelling the task that awaits `stand_by` sets its `cancel`, too."""
    takes_cancel = "cancel" in signature(open_outbox).parameters

    @wraps(open_outbox)
    def open_(*args: _Args.args, **settings: _Args.kwargs) -> OpeningOutbox:
        if takes_cancel and settings.get("cancel") is None:
            settings["cancel"] = threading.Event()
        return OpeningOutbox(
            partial(open_outbox, *args, **settings), cast("threading.Event | None", settings.get("cancel"))
        )

    return open_


class AsyncOutbox:
    """An Outbox in one event loop; made by `AsyncOutbox.open`, or around an Outbox that threads use, too.

    It belongs to the loop in which it is first used. Not usable in a fork.
    """

    def __init__(self, outbox: Outbox) -> None:
        if not isinstance(outbox, Outbox):
            raise BadArgument("outbox", "give an open Outbox, or write `await AsyncOutbox.open(directory, ...)`")
        self.outbox = outbox
        """The same outbox, for threads, and for what does not wait: `status`, `lag`, `last_metadata`, `pid`. Reading
        its `log` waits for the disk, so read it in a thread.
        """
        self._serializes = outbox.values.serializes
        self._block_ms = outbox.facts.settings.config.block_ms
        self._turn = asyncio.Lock()  # held by the first task that waits for memory; the others queue for the lock
        self._waiting = 0
        # Appends left before other tasks get a turn. 0 while a task waits for memory, so that no append overtakes it.
        self._in_a_row = _APPENDS_IN_A_ROW

    async def append(  # noqa: PLR0913, PLR0917 - a record's columns
        self,
        partition: int | None = None,
        value: Any = MISSING,
        key: Any = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
        metadata: StreamMetadata | None = None,
    ) -> Receipt:
        """Append one record; `await` the receipt for its offset. Arguments and errors as of `Outbox.append`.

        Suspends the task while the buffer is full, up to `block_ms`, then raises `BufferFull`. After 128 appends in a
        row it also suspends for one turn of the loop. If it is cancelled before it returns, nothing was appended.
        The first value of a type is serialized in a thread: a schema registry may have to be asked.
        """
        if headers and hasattr(headers, "__next__"):
            headers = tuple(headers)  # an iterator could be read only once, and a retry reads it again
        if self._serializes:
            return await self._append_serialized(partition, value, key, headers, timestamp_ms, metadata)
        if self._in_a_row > 0:
            self._in_a_row -= 1
            try:
                return self.outbox.append(partition, value, key, headers, timestamp_ms, metadata, block=False)
            except BufferFull as full:
                _raise_if_waited(full)
        record = (partition, value, key, headers, timestamp_ms, metadata)
        return await self._append_in_turn(partial(self.outbox.append, *record, block=False))

    async def _append_serialized(self, partition: int | None, value: Any, key: Any, *others: Any) -> Receipt:
        """Serialized once, however often it is tried to append it."""
        make = partial(self.outbox.serialized, partition, value, key, *others)
        try:
            append = make() if self.outbox.values.has_seen([value], [key]) else await _in_thread(make)
        except PushrepError as error:
            self.outbox.count_refused(error)
            raise
        return await self._append_in_turn(append)

    async def append_many(  # noqa: PLR0913 - the records' columns
        self,
        partition: int,
        values: Sequence[Any],
        *,
        keys: Sequence[Any] | None = None,
        headers: Sequence[Iterable[tuple[str, bytes | None]]] | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        metadata: StreamMetadata | Sequence[StreamMetadata] | None = None,
    ) -> Receipt:
        """Append records that stay neighbours in the log; arguments and errors as of `Outbox.append_many`.

        It runs in the loop's thread: a few thousand records at a time hold up the other tasks for a millisecond or two.
        """
        if self._serializes:
            make = partial(self.outbox.serialized_many, values, keys)
            # Anything but a list may be read once only.
            is_seen = isinstance(values, list | tuple) and isinstance(keys, list | tuple | None)
            is_quick = is_seen and self.outbox.values.has_seen(values, keys or ())
            values, keys = make() if is_quick else await _in_thread(make)
        return await self._append_in_turn(
            lambda: self.outbox.append_serialized_many(
                partition,
                values,
                keys=keys,
                headers=headers,
                timestamps_ms=timestamps_ms,
                metadata=metadata,
                block=False,
            )
        )

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in threads
        """As `Outbox.flush`. Cancelling the task does not stop the flush."""
        await _in_thread(partial(self.outbox.flush, timeout))

    async def wait_shipped(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """As `Outbox.wait_shipped`."""
        await _in_thread(partial(self.outbox.wait_shipped, timeout))

    async def close(self) -> None:
        """As `Outbox.close`. Cancelling the task does not stop the close."""
        await _in_thread(self.outbox.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await _in_thread(partial(self.outbox.__exit__, kind, error, traceback))

    async def _append_in_turn(self, append: Callable[[], Receipt]) -> Receipt:
        try:
            await asyncio.sleep(0)
            if not self._waiting:
                self._in_a_row = _APPENDS_IN_A_ROW
                try:
                    return append()
                except BufferFull as full:
                    _raise_if_waited(full)
            return await self._in_turn(append)
        except asyncio.CancelledError as error:
            error.add_note(f"the outbox in {self.outbox.directory} had not taken the record yet: it is not delivered")
            raise

    async def _in_turn(self, append: Callable[[], Receipt]) -> Receipt:
        """Append after the tasks that already wait for memory; raise `BufferFull` after `block_ms`."""
        self._waiting += 1
        self._in_a_row = 0
        try:
            async with asyncio.timeout(self._block_ms / 1000), self._turn:
                return await self._when_bytes_freed(append)
        except TimeoutError:
            try:
                return append()
            except BufferFull as full:
                raise BufferFull(
                    buffer_bytes=full.buffer_bytes, wanted_bytes=full.wanted_bytes, block_ms=self._block_ms
                ) from None
        finally:
            self._waiting -= 1

    async def _when_bytes_freed(self, append: Callable[[], Receipt]) -> Receipt:
        loop = asyncio.get_running_loop()
        while True:
            freed = loop.create_future()
            # Registered before the attempt, so that memory freed in between is noticed.
            self.outbox.facts.budget.when_given(partial(call_in_loop, loop, partial(_resolve, freed)))
            try:
                return append()
            except BufferFull:
                await freed

    open = staticmethod(_opened_in_thread(Outbox.open))
    open_slot = staticmethod(_opened_in_thread(Outbox.open_slot))
    stand_by = staticmethod(_opened_in_thread(Outbox.stand_by))


def _raise_if_waited(full: BufferFull) -> None:
    """Raise the error of a FakeOutbox: a test ordered it, and no memory will be freed."""
    if full.block_ms:
        raise full


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _in_thread(call: Callable[[], _Answer]) -> _Answer:
    """Run `call` in a thread of its own, in the task's context, which has its span, and return its result: a slow disk
    would use up the loop's few executor threads.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[None] = loop.create_future()
    done: list[_Answer] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised in the task
            failed.append(error)
        call_in_loop(loop, partial(_resolve, answered))

    threading.Thread(target=copy_context().run, args=(run,), name="pushrep-async", daemon=True).start()
    await answered
    if failed:
        raise failed[0]
    return done[0]
