"""AsyncOutbox and awaited receipts, in asyncio's own loop and in uvloop."""

import asyncio
import gc
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial

import pytest
import uvloop

from pushrep import AsyncOutbox, Outbox
from pushrep.errors import ForkedProcess
from pushrep.log import LogConfig, SegmentLog
from pushrep.outbox import BufferFull, DeliveryFailed, NoOutbox, OutboxClosed, RecordRefused
from pushrep.outbox.batch import STEP
from tests.support.forks import code_in_fork
from tests.support.outbox_arguments import outbox_arguments
from tests.support.simulated_disk import SimulatedDisk
from tests.unit.gated_disk import GatedDisk, until

WAIT_S = 60


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine in a new event loop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield lambda main: runner.run(asyncio.wait_for(main, WAIT_S))


def settings(**other):
    return {"topic": "orders", "partitions": 2, "producer": "billing", **other}


def held_disk(path, **other):
    """An outbox whose disk syncs only while its gate is open."""
    disk = GatedDisk()
    return disk, Outbox.open(path, **outbox_arguments(filesystem=disk, **settings(**other)))


def test_receipts_are_awaited_any_number_of_times(tmp_path, run):
    async def main():
        async with AsyncOutbox.open(tmp_path, **outbox_arguments(**settings())) as outbox:
            first = await outbox.append(1, b"a")
            assert not first.done()
            assert [await first, await first, first.result(0)] == [0, 0, 0]
            many = await outbox.append_many(1, [bytes(100_000) for _ in range(9)])  # several batches, one receipt
            assert await many == 1
            assert await asyncio.wait_for(await outbox.append(1, b"last"), WAIT_S) == 10
            await outbox.flush()
            assert outbox.outbox.log(1).flushed_offset == 11
            assert outbox.outbox.last_metadata(outbox.outbox.pid, 1) == 10
        with pytest.raises(OutboxClosed):
            await outbox.append(1, b"late")

    run(main())


def test_a_receipt_of_a_plain_outbox_can_be_awaited(tmp_path, run):
    async def main():
        with Outbox.open(tmp_path, **outbox_arguments(linger_ms=3_600_000, **settings())) as outbox:
            receipts = [outbox.append(0, b"%d" % n) for n in range(5)]
            assert await asyncio.gather(*receipts) == [0, 1, 2, 3, 4], "awaiting seals, as result() does"
            assert len(list(outbox.log(0).batches(0))) == 1, "once for all that wait in one iteration of the loop"

    run(main())


def test_errors_of_an_outbox_come_through(tmp_path, run):
    async def main():
        with pytest.raises(NoOutbox):
            await AsyncOutbox.open(tmp_path / "none", **outbox_arguments(create=False, **settings()))
        async with AsyncOutbox.open(tmp_path, **outbox_arguments(**settings())) as outbox:
            with pytest.raises(RecordRefused):
                await outbox.append(7, b"")
        disk = SimulatedDisk()
        config = LogConfig(preallocate_bytes=0)
        with Outbox.open("/full", **outbox_arguments(filesystem=disk, log_config=config, **settings())) as outbox:
            disk.capacity_bytes = disk.used_bytes()
            with pytest.raises(DeliveryFailed, match="not in the log"):
                await outbox.append(0, b"a")

    run(main())


def test_ten_thousand_receipts_wait_for_a_stalled_disk_without_a_thread_each(tmp_path, run):
    count, done, ticks = 10_000, [], 0
    disk, outbox = held_disk(tmp_path)

    async def wait_for(receipt):
        done.append(await receipt)

    async def main():
        nonlocal ticks
        shared = AsyncOutbox(outbox)
        disk.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            for n in range(count):
                tasks.create_task(wait_for(await shared.append(n % 2, b"%d" % n)))
            assert ticks >= count // 128 - 1, "a loop over append lets other tasks run"
            threads = threading.active_count()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not done
            assert threading.active_count() <= threads + 1 < 15, "the pool of the disk may have grown by one"
            before, steps = ticks, 0
            disk.gate.set()
            while len(done) < count:
                last, last_ticks = len(done), ticks
                await asyncio.sleep(0)
                assert len(done) - last <= 2 * STEP * max(1, ticks - last_ticks), "resolved in steps"
                steps += 1
            assert ticks - before >= count // STEP - 1
            ticking.cancel()

    async def tick():
        nonlocal ticks, ticking
        ticking = asyncio.current_task()
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def both():
        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        await main()
        await asyncio.gather(ticker, return_exceptions=True)

    ticking = None
    try:
        run(both())
    finally:
        disk.gate.set()
        outbox.close()
    assert sorted(done) == sorted([*range(count // 2)] * 2)


def test_a_pending_receipt_gives_the_collector_one_object_more_than_a_bare_future(tmp_path, run):
    count = 1_000
    disk, outbox = held_disk(tmp_path)

    async def bare(held):
        held.append(asyncio.get_running_loop().create_future())
        await held[-1]

    async def order(shared):
        await (await shared.append(0, b"value"))

    async def tracked(start):
        """Objects that every full collection looks at, by task that waits."""
        for _ in range(10):
            await asyncio.sleep(0)  # what was cancelled before is gone
        gc.collect()
        before = len(gc.get_objects())
        tasks = [asyncio.ensure_future(start()) for _ in range(count)]
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()
        found = (len(gc.get_objects()) - before) / count
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def main():
        shared = AsyncOutbox(outbox)
        disk.gate.clear()
        await tracked(partial(bare, []))
        more = await tracked(partial(order, shared)) - await tracked(partial(bare, []))
        assert more < 1.5, "who awaits it, and no receipt that nobody else holds"

    try:
        run(main())
    finally:
        disk.gate.set()
        outbox.close()


def test_an_outbox_without_replicas_brings_no_wire_and_no_http_server(tmp_path):
    """Each full garbage collection goes over all imported modules, and blocks the event loop meanwhile."""
    story = (
        "import sys\n"
        "from pushrep import AsyncOutbox, Outbox\n"
        f"with Outbox.open({str(tmp_path / 'outbox')!r}, topic='orders', partitions=1, producer='billing') as outbox:\n"
        "    outbox.append(0, b'value').result()\n"
        "print(*sys.modules)\n"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", story], check=True, capture_output=True, text=True).stdout.split()
    )
    assert "pushrep.outbox.async_outbox" in loaded
    unwanted = {"pushrep.replicate.leading", "pushrep.wire.frames", "pushrep.health", "fastavro", "email"}
    assert not unwanted & loaded


def test_a_full_buffer_suspends_the_task_and_not_the_loop(tmp_path, run):
    disk, plain = held_disk(tmp_path, batch_bytes=1000, buffer_bytes=2000)
    order = []

    async def fill(outbox, name, count):
        for n in range(count):
            receipt = await outbox.append(0, b"%s %03d" % (name, n) + bytes(100))
            order.append((name, n))
        await receipt

    async def main():
        outbox = AsyncOutbox(plain)
        disk.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            for name in (b"a", b"b"):
                tasks.create_task(fill(outbox, name, 100))
            taken = -1
            while taken != len(order):
                taken = len(order)
                await asyncio.sleep(0.01)
            assert 0 < taken < 50, "both are suspended, and this task runs"
            waiting = asyncio.create_task(outbox.append(0, b"not wanted"))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await waiting
            assert "had not taken" in cancelled.value.__notes__[0]
            disk.gate.set()
        async with asyncio.timeout(WAIT_S):
            await outbox.flush()
        values = [record.value.rstrip(b"\0") for record in plain.log(0).records(0)]
        for name in (b"a", b"b"):
            assert [value for value in values if value.startswith(name)] == [b"%s %03d" % (name, n) for n in range(100)]
        assert len(values) == 200, "what was cancelled is not among them"

    try:
        run(main())
    finally:
        disk.gate.set()
        plain.close()


async def turns_of(append, count):
    """How often other tasks ran while one appended so many records."""
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    for _ in range(count):
        await append()
    ticking.cancel()
    return turns


@pytest.mark.parametrize("append", ["append", "append_many"])
def test_whatever_a_full_buffer_refuses_waits_in_the_loop(tmp_path, run, append):
    """`Outbox` itself would wait in its thread, the loop's, in which nobody could open the gate meanwhile."""
    disk, plain = held_disk(tmp_path, batch_bytes=10_000, buffer_bytes=50_000, block_ms=5_000)
    value = bytes(5000)

    async def main():
        outbox = AsyncOutbox(plain)
        disk.gate.clear()
        with suppress(BufferFull):
            while True:
                plain.append_many(0, [value], block=False)
        headers = (one for one in [("a", b"1")])  # an iterator is read once, however often it is tried
        waiting = asyncio.create_task(
            outbox.append(0, value, headers=headers) if append == "append" else outbox.append_many(0, [value])
        )
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        disk.gate.set()
        assert await (await waiting) == plain.log(0).log_end_offset - 1
        (*_, last) = plain.log(0).records(0)
        assert last.headers == ((("a", b"1"),) if append == "append" else ())
        if append == "append":
            assert await turns_of(lambda: outbox.append(0, b"", timestamp_ms=1), 2 * 128) == 2, "memory is free again"

    try:
        run(main())
    finally:
        disk.gate.set()
        plain.close()


def test_a_buffer_that_stays_full_refuses_after_block_ms(tmp_path, run):
    disk, plain = held_disk(tmp_path, batch_bytes=1000, buffer_bytes=2000, block_ms=50)

    async def main():
        outbox = AsyncOutbox(plain)
        disk.gate.clear()

        async def fill():
            while True:
                await outbox.append(0, bytes(100))

        with pytest.raises(BufferFull) as refused:
            await fill()
        assert refused.value.block_ms == 50
        both = await asyncio.gather(*(outbox.append(0, bytes(100)) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in both] == [BufferFull, BufferFull], "who stands second is refused in time, too"

    try:
        run(main())
    finally:
        disk.gate.set()
        plain.close()


def test_a_cancelled_await_says_that_the_record_may_still_be_delivered(tmp_path, run):
    disk, plain = held_disk(tmp_path)

    async def main():
        disk.gate.clear()
        receipt = plain.append(0, b"a")
        with pytest.raises(TimeoutError) as late:
            async with asyncio.timeout(0.01):
                await receipt
        assert "may still be delivered" in late.value.__cause__.__notes__[0]
        waiting = asyncio.ensure_future(receipt)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await waiting
        assert "may still be delivered" in cancelled.value.__notes__[0]
        disk.gate.set()
        assert await receipt == 0, "the receipt has the answer all the same"

    try:
        run(main())
    finally:
        disk.gate.set()
        plain.close()


def test_callbacks_are_called_once_when_it_is_decided(tmp_path, caplog):
    disk, outbox = held_disk(tmp_path)
    called = []
    disk.gate.clear()
    one = outbox.append(0, b"a")
    one.add_done_callback(lambda _: 1 / 0)
    one.add_done_callback(lambda receipt: called.append(receipt.result(0)))
    many = outbox.append_many(0, [bytes(100_000) for _ in range(9)])
    many.add_done_callback(lambda receipt: called.append((receipt.done(), receipt.result(0))))
    until(lambda: outbox.log(0).log_end_offset > 0, "the writer is in its sync")
    assert called == []
    disk.gate.set()
    assert many.result(WAIT_S) == 1
    until(lambda: len(called) == 2, "both are called")
    assert called == [0, (True, 1)]
    assert "a callback of a receipt of orders-0 failed" in caplog.text
    one.add_done_callback(called.append)
    assert called[2:] == [one], "here and now, once it is done"
    outbox.close()


def test_a_wait_that_was_cancelled_is_no_error_of_the_loop_once_its_thread_ends(tmp_path, run):
    disk, plain = held_disk(tmp_path)
    errors = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        disk.gate.clear()
        await (outbox := AsyncOutbox(plain)).append(0, b"a")
        flush = asyncio.create_task(outbox.flush())
        await asyncio.sleep(0)
        flush.cancel()
        await asyncio.wait([flush])
        disk.gate.set()
        await outbox.flush()
        for thread in threading.enumerate():
            if thread.name == "pushrep-async":
                await asyncio.to_thread(thread.join, WAIT_S)
        await asyncio.sleep(0)

    try:
        run(main())
    finally:
        disk.gate.set()
        plain.close()
    assert errors == []


def test_a_loop_that_is_gone_does_not_disturb_the_writers(tmp_path):
    disk, outbox = held_disk(tmp_path)
    disk.gate.clear()
    receipt = outbox.append(0, b"a")

    async def give_up():
        await asyncio.wait([asyncio.ensure_future(receipt)], timeout=0.01)

    asyncio.run(give_up())
    disk.gate.set()
    assert receipt.result(WAIT_S) == 0
    assert outbox.append(0, b"b").result(WAIT_S) == 1
    outbox.close()


def test_an_open_that_is_cancelled_frees_the_directory(tmp_path, run):
    class SlowToMake(GatedDisk):
        def make_directory(self, path):
            begun.set()
            self.gate.wait()
            super().make_directory(path)

    disk, begun = SlowToMake(), threading.Event()
    disk.gate.clear()

    async def main():
        async def open_outbox():
            return await AsyncOutbox.open(tmp_path / "outbox", **outbox_arguments(filesystem=disk, **settings()))

        opening = asyncio.create_task(open_outbox())
        await asyncio.to_thread(begun.wait, WAIT_S)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        disk.gate.set()
        while True:
            try:
                with SegmentLog.open(tmp_path / "outbox" / "orders-0"):
                    break
            except Exception:  # noqa: BLE001 - it is being opened, or closed
                await asyncio.sleep(0.01)

    run(main())


def test_a_fork_is_refused(tmp_path):
    with Outbox.open(tmp_path, **outbox_arguments(linger_ms=3_600_000, **settings())) as outbox:
        receipt = outbox.append(0, b"a")

        async def child():
            try:
                await receipt
            except ForkedProcess:
                receipt.add_done_callback(print)

        def in_fork():
            with pytest.raises(ForkedProcess):
                asyncio.run(child())

        assert code_in_fork(in_fork) == 0
