"""Ctrl-C at any moment in a program that continues: no acknowledged record is lost, and `close` returns."""

import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import count

import pytest

from pushrep.log import Durability, LogConfig, LogEndMoved, LogPoisoned, SegmentLog
from pushrep.log.writer import LogWriter
from pushrep.outbox import Outbox, OutboxConfig

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C inside a __del__


class Interrupts:
    """While armed, the next tick of the timer raises KeyboardInterrupt."""

    def __init__(self):
        self.armed, self.count = False, 0

    def tick(self, *args):
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt


@pytest.fixture
def interrupts():
    made = Interrupts()
    before = signal.signal(signal.SIGALRM, made.tick)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.003)
    yield made
    made.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_log_under_interrupts(tmp_path, interrupts, torture):
    random = torture.random("log")
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=2000, flush_ms=10, flush_bytes=3000))
    acknowledged, end_s, number = {}, time.monotonic() + torture.count(1, 20), 0
    try:
        while time.monotonic() < end_s or not interrupts.count:
            number += 1
            try:
                interrupts.armed = True
                result = log.append([b"%d" % number] * random.randrange(1, 4), durability=random.choice([*Durability]))
                interrupts.armed = False
            except KeyboardInterrupt:
                continue
            acknowledged[result.base_offset] = b"%d" % number
        log.close()
    except LogPoisoned:  # interrupted while it took an interrupted append back: it says so, and opens again
        log.close()
    with SegmentLog.open(log.path) as opened:
        values = [record.value for record in opened.records(0)]
        assert opened.recovery.damaged_from is None
    assert {offset: values[offset] for offset in acknowledged} == acknowledged


def test_others_go_on_while_the_main_thread_is_interrupted(tmp_path, interrupts, torture):
    """The records of other threads are written, or refused because the log was poisoned: no thread waits for the
    interrupted one.
    """
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=20_000, flush_ms=10))
    acknowledged, over = {}, threading.Event()

    def work(name):
        with suppress(LogPoisoned):
            for number in count():
                value = b"%d %d" % (name, number)
                acknowledged[log.append(value).base_offset] = value
                if over.is_set():
                    return

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(4)]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + torture.count(1, 20)
    while (time.monotonic() < end_s or not interrupts.count) and not log.why_no_append():
        with suppress(KeyboardInterrupt):
            interrupts.armed = True
            log.append(b"main")
            interrupts.armed = False
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    log.close()
    with SegmentLog.open(log.path) as opened:
        values = [record.value for record in opened.records(0)]
    assert {offset: values[offset] for offset in acknowledged} == acknowledged


def interrupted_at(number, call):
    """Ctrl-C where LogWriter.append calls its so-manieth function, as that begins; whether it got that far."""
    calls = count()

    def trace(frame, event, _):
        if event == "call" and frame.f_back.f_code is LogWriter.append.__code__ and next(calls) == number:
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_records_that_hold_their_offsets_stand_there_after_any_interrupt(tmp_path):
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=500))
    told = []
    for number in count():
        went_on = not interrupted_at(number, lambda: log.append(b"interrupted", durability=Durability.BUFFERED))
        offset = log.log_end_offset
        try:
            log.append(b"%d" % offset, base_offset=offset)
        except LogEndMoved:
            offset = log.log_end_offset  # who asks again is told
            log.append(b"%d" % offset, base_offset=offset)
        told.append(offset)
        if went_on:
            break
    assert len(told) > 8, "the steps of an append"
    log.close()
    with SegmentLog.open(log.path) as log:
        values = [record.value for record in log.records(0)]
    assert [values[offset] for offset in told] == [b"%d" % offset for offset in told]


def test_an_outbox_under_interrupts(tmp_path, interrupts, torture):
    random = torture.random("outbox")
    config = OutboxConfig(linger_ms=1, close_timeout_s=200, log_config=LogConfig(batch_bytes=500))
    outbox = Outbox.open(tmp_path, "orders", 1, "billing", config=config)
    receipts, end_s, number = [], time.monotonic() + torture.count(1, 20), 0
    while time.monotonic() < end_s or not interrupts.count:
        number += 1
        kind = random.random()
        try:
            interrupts.armed = True
            if kind < 0.1:
                outbox.flush(200)
            elif kind < 0.3:
                receipt = outbox.append_many(0, [b"%d" % number] * 3, timestamps_ms=5)
            else:
                receipt = outbox.append(0, b"%d" % number)
            interrupts.armed = False
        except KeyboardInterrupt:
            continue
        if kind >= 0.1:
            receipts.append((receipt, b"%d" % number))
    outbox.close()
    with SegmentLog.open(tmp_path / "orders-0") as log:
        values = [record.value for record in log.records(0)]
    assert [values[receipt.result(0)] for receipt, _ in receipts] == [value for _, value in receipts]
