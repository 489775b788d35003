"""G23: 10,000 receipts at a time, 100 B, D2, awaited by tasks of one event loop beside the threaded Outbox.

Both sides append a window of 10,000 records and then ask every receipt, ten times. The third side has a task for each
record that appends and awaits; its peer is 256 threads that append and wait. The loop's delay is how late a timer of
1 ms fires, while the windows run and while the disk stands still for a second with 10,000 tasks waiting.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.harness import compare, random_values, scratch
from pushrep import AsyncOutbox, Outbox
from pushrep.seams import File, RealFilesystem

WINDOW, WINDOWS = 10_000, 10
CALLERS = 256
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
        gc.collect()
        gc.freeze()  # as docs/outbox.md advises: a full collection of a program's modules alone takes tens of ms
        delays = asyncio.run(_delay_of(_windows(outbox, values)))
        windows["notes"] = [f"the loop's delay while the windows run: {delays}"]
        windows["notes"].append(f"while the disk stands still: {_stalled(root / 'stalled', values)}")
        return {"G23: 10,000 receipts at a time, 100 B, D2": windows, "10,000 callers at a time, 100 B, D2": tasks}


def _open(path: Path, **settings: Any) -> Outbox:
    return Outbox.open(path, topic="outbox", partitions=1, producer="benchmark", **settings)


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


async def _delay_of(main: Coroutine[Any, Any, object]) -> str:
    late: list[float] = []
    busy: list[float] = []

    async def tick() -> None:
        while True:
            due, used = time.perf_counter() + 0.001, time.thread_time()
            await asyncio.sleep(0.001)
            late.append((time.perf_counter() - due) * 1000)
            busy.append((time.thread_time() - used) * 1000)

    ticking = asyncio.create_task(tick())
    await main
    ticking.cancel()
    return f"{_spread(late)}; of that the loop's own processor time: {_spread(busy)}"


def _spread(taken_ms: list[float]) -> str:
    taken_ms.sort()
    p50, p99 = taken_ms[len(taken_ms) // 2], taken_ms[len(taken_ms) * 99 // 100]
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {taken_ms[-1]:.1f} ms"


def _stalled(path: Path, values: list[bytes]) -> str:
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
