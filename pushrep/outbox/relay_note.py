"""table-relay.json: how far the relay of a database's rows (pushrep/tables) is in this outbox.

    {"version": 1, "epoch": 1, "batch": 7, "ends": {"0": 42, "1": 17}, "crc32c": int}

In the database every batch up to `batch` of `epoch` is closed, and records of later ones lie at `ends` or behind it.
Whoever opens the outbox keeps those, whether a relay runs or not: the next start of the relay tells by them what it has
appended already. A relay that ends between two batches leaves no `ends`. The note may be some seconds behind the
database, never ahead of it: a batch that it does not know is known by its records.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.env import Filesystem
from pushrep.env.checked_json import read_checked_json, write_checked_json

FILE_NAME = "table-relay.json"
HOLDER = "table relay"
_VERSION, _BYTES_MAX = 1, 1 << 26  # of 2**20 partitions
_WAY_ON = "restore it from a copy, or remove it: then the relay goes by the outbox's records alone"


class RelayNote(NamedTuple):
    """What the file says."""

    epoch: int
    batch: int
    ends: Mapping[int, int]


class RelayNotes:
    """The file of a directory that is locked."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        """Raises CorruptFile, OSError."""
        self._filesystem, self._path = filesystem, directory / FILE_NAME
        self.note = read_checked_json(self._filesystem, self._path, _BYTES_MAX, _VERSION, _note_of, _WAY_ON)
        """None: no relay ever ran here."""

    def write(self, note: RelayNote) -> None:
        """On disk when this returns. Raises OSError."""
        fields = {**note._asdict(), "ends": {str(partition): end for partition, end in note.ends.items()}}
        write_checked_json(self._filesystem, self._path, fields, _VERSION)
        self.note = note

    @property
    def closed(self) -> tuple[int, int] | None:
        """Epoch and number of the newest batch that is noted as closed."""
        return None if self.note is None else self.note[:2]

    def needed_from(self, partition: int) -> int | None:
        """What has to stay in a partition's log, as retention asks."""
        return None if self.note is None else self.note.ends.get(partition)


def _note_of(fields: Mapping[str, Any]) -> RelayNote:
    ends = {int(partition): int(end) for partition, end in fields["ends"].items()}
    return RelayNote(int(fields["epoch"]), int(fields["batch"]), ends)
