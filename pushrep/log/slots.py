"""Many outboxes below one directory, each of one worker, as those who only look see them: all slots as one.

    <directory>/slot-0/outbox.json, orders-0, ...          made by Outbox.open_slot
               /slot-7/outbox.json, orders-0, ...

Each log of a topic has a number of its own among all slots, which fits where a partition's does (31 bits):

    log                        its number               shown as
    orders-3, without slots    3                        orders-3
    slot-7/orders-3            1 << 30 | 7 << 20 | 3    slot-7/orders-3

An outbox has at most 2**20 partitions, a directory at most 1,000 slots. A slot's records have a PID of their own.
"""

import re
from pathlib import Path

from filtering.errors import PARTITION_BITS, SLOT_BIT, shown_partition
from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.errors import checked_path
from pushrep.log.directory_files import list_logs, log_name, parse_log_name
from pushrep.log.errors import InvalidLogName, NotALogDirectory

OUTBOX_FILE_NAME = "outbox.json"
SLOTS_MAX = 1000
_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,2})")
assert SLOT_BIT >> PARTITION_BITS >= SLOTS_MAX, "numbers of slots stay below the bit that says that it is one"


def slot_path(directory: Path, slot: int) -> Path:
    """Where the outbox of a slot is."""
    return directory / f"slot-{slot}"


def slot_directories(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[Path]:
    """The slots in which an outbox was made, by their number; empty for a directory that has none."""
    return [slot_path(Path(directory), slot) for slot in _slots(Path(directory), filesystem)]


def outboxes_at(directory: Path | str) -> list[Path]:
    """The slots below a directory, or the directory itself if it has none: what a tool looks at."""
    return slot_directories(directory) or [Path(directory)]


def readable_logs(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[tuple[str, int]]:
    """(topic, number) of every log in a directory of logs, or in its slots, sorted. Raises NotALogDirectory."""
    parent = checked_path("directory", directory)
    slots = _slots(parent, filesystem)
    if not slots:
        return list_logs(parent, filesystem)
    found = []
    for slot in slots:
        try:
            logs = list_logs(slot_path(parent, slot), filesystem)
        except NotALogDirectory:
            continue  # removed meanwhile
        found += [(topic, SLOT_BIT | slot << PARTITION_BITS | n) for topic, n in logs if not n >> PARTITION_BITS]
    return sorted(found)


def log_at(directory: Path | str, topic: str, number: int) -> Path:
    """Where the log of this number lies, or would. Raises InvalidLogName."""
    return Path(directory) / shown_name(topic, number)


def shown_name(topic: str, number: int) -> str:
    """The log's name for people, which is its path below the directory. Raises InvalidLogName."""
    slot, slash, _ = shown_partition(number).rpartition("/")
    return f"{slot}{slash}{log_name(topic, in_its_slot(number))}"


def in_its_slot(number: int) -> int:
    """The partition of that number's log in the outbox of its slot, or without slots."""
    return number % (1 << PARTITION_BITS) if SLOT_BIT <= number < 2 * SLOT_BIT else number


def parse_shown_partition(text: str) -> int:
    """The number of `3`, or `slot-7/3`. Raises InvalidLogName."""
    slot, slash, partition = text.rpartition("/")
    return parse_shown_name(f"{slot}{slash}t-{partition}")[1]


def parse_shown_name(text: str) -> tuple[str, int]:
    """(topic, number) of `<topic>-<n>` or `slot-<m>/<topic>-<n>`. Raises InvalidLogName."""
    slot, slash, name = text.rpartition("/")
    if not slash:
        return parse_log_name(text)
    match = _NAME.fullmatch(slot)
    topic, partition = parse_log_name(name)
    if match is None or partition >> PARTITION_BITS:
        raise InvalidLogName(text, "slot-<m>/<topic>-<n> is wanted")
    return topic, SLOT_BIT | int(match[1]) << PARTITION_BITS | partition


def is_named(log: tuple[str, int], text: str) -> bool:
    """Whether `<topic>-<n>` or `slot-<m>/<topic>-<n>` names the log; without a slot it names that of every slot."""
    name = shown_name(*log)
    return text in {name, name.rpartition("/")[2]}


def shown_below(directory: Path | str, log: Path) -> str:
    """The name for people of a log that a look at `directory` has found: with its slot, if that is not `directory`."""
    is_slot = _NAME.fullmatch(log.parent.name) is not None and Path(directory) == log.parent.parent
    return f"{log.parent.name}/{log.name}" if is_slot else log.name


def _slots(directory: Path, filesystem: Filesystem) -> list[int]:
    try:
        matches = [match for name in filesystem.list(directory) if (match := _NAME.fullmatch(name))]
    except OSError:
        return []
    slots = sorted(int(match[1]) for match in matches)
    return [slot for slot in slots if filesystem.exists(slot_path(directory, slot) / OUTBOX_FILE_NAME)]
