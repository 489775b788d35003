"""What dead workers left in their slots is shipped by the workers that live.

    SlotShipper, a thread of each worker that ships: looks at the slots beside its own every LOOK_S
    free, with records that the topic has not ─▶ opens it ─▶ all shipped, or somebody wants it ─▶ closes it

    Outbox.open of a slot ─▶ take_back: asks the process that ships it for others, by the call `give-up` of the slot's
    control socket, and waits until it is closed

A process that has the lock of two slots ships one of them for others. A slot that can't be shipped is left for a while,
and is the problem `slot_waits` like one that nobody looks at.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from pushrep.errors import PushrepError
from pushrep.kafka.errors import ShippingStopped, ShippingTimeout
from pushrep.log import LogLocked
from pushrep.log.directory_files import is_slot, slot_directories
from pushrep.log.inspection import lock_holder
from pushrep.outbox.control import CallRefused, NobodyAnswers, ask
from pushrep.outbox.shipping import holder_name
from pushrep.outbox.status import Facts, closed_status

_LOG = logging.getLogger("pushrep.outbox")
LOOK_S = 2.0
_POLL_S = 0.1
_ASK_S = 1.0
_GIVEN_UP_S = 3.0
_STUCK_S = 10.0  # a slot of which nothing is shipped for so long is left
_AGAIN_S = 60.0

_wanted: dict[Path, threading.Event] = {}
"""The slots that this process ships for others, and whether somebody asked for them."""


class SlotShipper:
    """Ships the slots beside that of `own` until `close`. open_slot: opens the outbox of one as `own` was opened."""

    def __init__(self, own: Facts, topic: str, open_slot: Callable[[Path], AbstractContextManager[Any]]) -> None:
        self._own, self._name, self._open = own, holder_name(topic), open_slot
        self._again_s: dict[Path, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pushrep-slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up what is shipped now, and end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        here = self._own.directory
        while not self._stopping.wait(LOOK_S):
            for slot in slot_directories(here.parent):
                if self._stopping.is_set() or slot == here or monotonic() < self._again_s.get(slot, 0.0):
                    continue
                try:
                    if self._is_left(slot):
                        self._ship(slot)
                except LogLocked:  # somebody was faster
                    pass
                except (PushrepError, OSError) as error:
                    self._leave(slot, str(error))

    def _is_left(self, slot: Path) -> bool:
        """Whether nobody has the slot open, and the topic lacks records of it; not while no topic is reached."""
        sink = self._own.shipping.sink
        if sink is None or sink.state.trouble is not None or lock_holder(slot) is not None:
            return False
        found = closed_status(slot, "")
        records = {one.name: one.records for one in found.destinations}
        return records.get(self._name, found.log_end_offsets) > 0

    def _ship(self, slot: Path) -> None:
        wanted = _wanted[slot.resolve()] = threading.Event()
        try:
            with self._open(slot) as outbox:
                _LOG.info("%s: nobody has it open, what is left in it is shipped", slot)
                left, moved_s = -1, monotonic()
                while not wanted.is_set() and not self._stopping.is_set():
                    try:
                        outbox.wait_shipped(_POLL_S)
                    except ShippingTimeout:
                        pass
                    except ShippingStopped:  # of one partition: the others go on
                        wanted.wait(_POLL_S)
                    else:
                        return
                    if (lag := outbox.facts.shipping.lag()[self._name]).records != left:
                        left, moved_s = lag.records, monotonic()
                    elif monotonic() > moved_s + _STUCK_S:
                        stopped = [f"partition {one.partition}: {one.reason}" for one in lag.stopped]
                        self._leave(slot, lag.trouble or "; ".join(stopped))
                        return
        finally:
            del _wanted[slot.resolve()]

    def _leave(self, slot: Path, why: str) -> None:
        self._again_s[slot] = monotonic() + _AGAIN_S
        _LOG.warning("%s: what is left in it can't be shipped now: %s", slot, why)


def give_up(slot: Path) -> bool:
    """The call `give-up`: whether this process ships the slot for others; then it is closed soon."""
    wanted = _wanted.get(slot.resolve())
    if wanted is not None:
        wanted.set()
    return wanted is not None


def take_back(slot: Path) -> None:
    """Return once no worker ships this slot for others any more; at once for a directory that is no slot, for a slot
    that a worker has for its own, and for the worker that is about to ship it for others.
    """
    if not is_slot(slot) or slot.resolve() in _wanted:
        return
    others = [one for one in slot_directories(slot.parent) if one != slot]
    until_s = monotonic() + _GIVEN_UP_S
    while others and (holder := lock_holder(slot)) and holder in map(lock_holder, others) and monotonic() < until_s:
        try:
            if not ask(slot, "give-up", timeout_s=_ASK_S):
                return
        except CallRefused:
            return
        except NobodyAnswers:  # it is being opened or closed
            pass
        sleep(_POLL_S / 4)
