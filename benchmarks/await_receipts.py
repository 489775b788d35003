"""G23: 10,000 receipts at a time, 100 B, D2, awaited by tasks of one event loop beside the threaded Outbox.

Both sides append a window of 10,000 records and then ask every receipt, ten times. The third side has a task for each
record that appends and awaits; its peer is 256 threads that append and wait. The loop's delay is how late a timer of
1 ms fires, while the windows run and while the disk stands still for a second with 10,000 tasks waiting. It is told
with the collections of garbage in it and without them, beside tasks that wait for futures of asyncio and no outbox.
"""

import asyncio
import gc
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import uvloop

from benchmarks.harness import compare, random_values, scratch
from pushrep import AsyncOutbox, Outbox
from pushrep.env import File, RealFilesystem
from tests.support.outbox_arguments import outbox_arguments

WINDOW, WINDOWS = 10_000, 10
CALLERS = 256
DELAY_ROUNDS = 5
GOALS = {"Outbox, one thread": 0.85}


def run(rounds: int) -> dict[str, Any]:
    """Two comparisons by title; the first one's notes hold the loop's delay."""
    with ExitStack() as stack:
        root = stack.enter_context(scratch("await-receipts"))
        values = random_values(WINDOW, 100)
        outbox = stack.enter_context(_open(root / "outbox"))
        threads = stack.enter_context(ThreadPoolExecutor(CALLERS))

        def one_thread() -> int:
            for _ in range(WINDOWS):
                for receipt in [outbox.append(0, value) for value in values]:
                    receipt.result()
            return WINDOW * WINDOWS

        def many_threads() -> int:
            share = values[: WINDOW // CALLERS]

            def caller(_: int) -> None:
                for value in share:
                    outbox.append(0, value).result()

            list(threads.map(caller, range(CALLERS)))
            return len(share) * CALLERS

        sides: dict[str, Callable[[], float]] = {
            "AsyncOutbox, asyncio": _in_loop(asyncio.new_event_loop, lambda: _windows(outbox, values)),
            "AsyncOutbox, uvloop": _in_loop(uvloop.new_event_loop, lambda: _windows(outbox, values)),
            "Outbox, one thread": one_thread,
        }
        windows = compare(sides, rounds=rounds, goals=GOALS)
        sides = {
            "a task for each record, asyncio": _in_loop(asyncio.new_event_loop, lambda: _tasks(outbox, values)),
            "a task for each record, uvloop": _in_loop(uvloop.new_event_loop, lambda: _tasks(outbox, values)),
            f"{CALLERS} threads": many_threads,
        }
        tasks = compare(sides, rounds=rounds)
        windows["notes"] = _delays(outbox, root, values)
        return {"G23: 10,000 receipts at a time, 100 B, D2": windows, "10,000 callers at a time, 100 B, D2": tasks}


def _open(path: Path, **settings: Any) -> Outbox:
    return Outbox.open(path, **outbox_arguments(topic="outbox", partitions=1, producer="benchmark", **settings))


def _in_loop(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], Coroutine[Any, Any, int]]
) -> Callable[[], int]:
    def side() -> int:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    return side


async def _windows(plain: Outbox, values: list[bytes]) -> int:
    outbox = AsyncOutbox(plain)
    for _ in range(WINDOWS):
        for receipt in [await outbox.append(0, value) for value in values]:
            await receipt
    return WINDOW * WINDOWS


async def _tasks(plain: Outbox, values: list[bytes]) -> int:
    outbox = AsyncOutbox(plain)

    async def order(value: bytes) -> None:
        await (await outbox.append(0, value))

    async with asyncio.TaskGroup() as tasks:
        for number, value in enumerate(values):
            tasks.create_task(order(value))
            if number % 100 == 0:
                await asyncio.sleep(0)  # as requests come in
    return len(values)


def _delays(outbox: Outbox, root: Path, values: list[bytes]) -> list[str]:
    told = []
    for collector in ("the collector as it is", "behind gc.freeze(), as docs/outbox.md advises"):
        for name, delay in {
            "10,000 receipts at a time": lambda: asyncio.run(_delay_of(_windows(outbox, values))),
            "10,000 tasks while the disk stands still": lambda: _stalled(root / "stalled", values),
            "10,000 tasks that wait for bare futures": lambda: asyncio.run(_delay_of(_bare())),
        }.items():
            rounds = [delay() for _ in range(DELAY_ROUNDS)]
            told.append(f"the loop's delay, {collector}, {name}, {DELAY_ROUNDS} rounds: {_spread(rounds)}")
        gc.collect()
        gc.freeze()
    gc.unfreeze()
    return told


async def _bare() -> None:
    loop = asyncio.get_running_loop()
    futures: deque[asyncio.Future[None]] = deque()

    async def order() -> None:
        futures.append(loop.create_future())
        await futures[-1]

    def resolve() -> None:
        for _ in range(min(256, len(futures))):
            futures.popleft().set_result(None)
        if futures:
            loop.call_soon(resolve)

    async with asyncio.TaskGroup() as tasks:
        for number in range(WINDOW):
            tasks.create_task(order())
            if number % 100 == 0:
                await asyncio.sleep(0)
        loop.call_later(1, resolve)  # not before: it ends where nobody waits, and others would come later


class Delay(NamedTuple):
    """How late one timer was; what the loop's thread did meanwhile, with collections of garbage and without."""

    late_ms: float
    busy_ms: float
    own_ms: float


async def _delay_of(main: Coroutine[Any, Any, object]) -> list[Delay]:
    delays: list[Delay] = []
    loop_thread = threading.get_ident()
    collected_s = began_s = 0.0

    def on_collection(phase: str, _: object) -> None:
        nonlocal collected_s, began_s
        if threading.get_ident() != loop_thread:  # it stops the loop, too, and counts as being late
            return
        if phase == "start":
            began_s = time.thread_time()
        else:
            collected_s += time.thread_time() - began_s

    async def tick() -> None:
        while True:
            due, used, collected = time.perf_counter() + 0.001, time.thread_time(), collected_s
            await asyncio.sleep(0.001)
            busy_s = time.thread_time() - used
            seconds = time.perf_counter() - due, busy_s, busy_s - (collected_s - collected)
            delays.append(Delay(*(one * 1000 for one in seconds)))

    gc.callbacks.append(on_collection)
    try:
        ticking = asyncio.create_task(tick())
        await main
        ticking.cancel()
    finally:
        gc.callbacks.remove(on_collection)
    return delays


def _spread(rounds: list[list[Delay]]) -> str:
    late = sorted(delay.late_ms for round_ in rounds for delay in round_)
    longest = [[max(delay[column] for delay in round_) for round_ in rounds] for column in range(3)]
    most, busy, own = (f"{statistics.median(of_rounds):.1f} ms (up to {max(of_rounds):.1f})" for of_rounds in longest)
    return (
        f"p50 {late[len(late) // 2]:.1f} ms, p99 {late[len(late) * 99 // 100]:.1f} ms, a round's longest {most}; "
        f"the loop's own processor time {busy}, without collections {own}"
    )


def _stalled(path: Path, values: list[bytes]) -> list[Delay]:
    go_on = threading.Event()
    go_on.set()

    class Stalling(RealFilesystem):
        def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
            return cast("File", StallingFile(super().open(path, create=create, writable=writable)))

    class StallingFile:
        def __init__(self, file: File) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def sync(self) -> None:
            go_on.wait()
            self._file.sync()

    async def main(plain: Outbox) -> None:
        go_on.clear()
        asyncio.get_running_loop().call_later(1, go_on.set)
        await _tasks(plain, values)

    with _open(path, filesystem=Stalling()) as plain:
        return asyncio.run(_delay_of(main(plain)))
