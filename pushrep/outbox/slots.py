"""Many workers below one directory: each opens a free slot, which is an outbox of its own.

    <directory>/slot-0/outbox.json, orders-0, ...      held by worker 4711
               /slot-1/...                             held by worker 4712
               /slot-2/...                             free: its worker died; the next one goes on with it

An outbox has one writer, and each worker of gunicorn, uvicorn, celery or multiprocessing is a process. A slot is held
by its directory's lock, which the system frees when its process ends, however that ends. The PID is the slot's, so
readers filter records that a worker's successor sends again. Records that a worker had not shipped when it ended are
shipped by the slot's next worker, or by `pushrep ship`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pushrep.errors import BadArgument, checked_path
from pushrep.log.directory_files import SLOTS_MAX, slot_directories, slot_path
from pushrep.log.errors import LogLocked
from pushrep.log.inspection import is_log
from pushrep.outbox.errors import NoFreeSlot
from pushrep.outbox.identity import FILE_NAME
from pushrep.settings import whole_number

_Outbox = TypeVar("_Outbox")


def open_free_slot(directory: Path | str, slots: int, open_outbox: Callable[[Path], _Outbox]) -> _Outbox:
    """Open the first slot that no process holds. Raises NoFreeSlot, BadArgument, what opening raises."""
    parent = checked_path("directory", directory)
    whole_number("slots", slots, 1, SLOTS_MAX)
    if (parent / FILE_NAME).exists():
        raise BadArgument(
            "directory", f"{parent} is an outbox itself: name the directory above its slots, or use Outbox.open"
        )
    holders: list[int | None] = []
    for path in _candidates(parent, slots):
        try:
            return open_outbox(path)
        except LogLocked as taken:
            holders.append(taken.pid)
    raise NoFreeSlot(parent, slots, holders)


def refuse_other_kinds(directory: Path) -> None:
    """Raise BadArgument where an outbox would be made among the files of one log, or beside slots: no worker could
    open its slot any more.
    """
    if (directory / FILE_NAME).exists():
        return
    if is_log(directory):
        raise BadArgument("directory", f"{directory} is a single log: name the directory above it, or a new one")
    if slots := slot_directories(directory):
        raise BadArgument(
            "directory",
            f"{directory} holds the outboxes of worker slots ({slots[0].name} ...): use Outbox.open_slot, or name one "
            "of the slots",
        )


def _candidates(parent: Path, slots: int) -> Iterator[Path]:
    """Used slots first, so that a dead worker's records are shipped soon."""
    used = [path for path in slot_directories(parent) if int(path.name.rpartition("-")[2]) < slots]
    yield from used
    yield from (path for path in (slot_path(parent, slot) for slot in range(slots)) if path not in used)
