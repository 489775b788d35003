"""What a relay fixes at its first use, kept beside its checkpoint: its names, and to how many partitions.

    <checkpoint>-relay/epoch-<n>.json     written once, whole or not at all; the highest n counts

Partitions that are added to the destination later are not used: a source partition that moved would be met in its new
place first, and its backlog in the old one fall below the mark. To use them is a new epoch of the PID.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_jobs.errors import SparkJobError
from spark_jobs.sinks.hadoop import HadoopDirectory

_NAME = re.compile(r"epoch-([0-9]{1,9})\.json")
_VERSION = 1


class RelayPinned(SparkJobError):
    """What is asked for is not what the checkpoint's relay began with: give its value, or a fresh checkpoint."""

    def __init__(self, setting: str, wanted: object, pinned: object, remedy: str) -> None:
        super().__init__(f"{setting} is {wanted!r}, and this checkpoint's relay began with {pinned!r}: {remedy}")
        self.setting, self.wanted, self.pinned = setting, wanted, pinned


class RelayPinDamaged(SparkJobError):
    """The file that says how this checkpoint's relay began can't be read: restore it, or begin a fresh checkpoint."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}; restore it, or begin with a fresh checkpoint and a new --epoch")
        self.path, self.why = path, why


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayPin:
    """`sources`: incarnation of each source topic or log that was there; `destination`: of the topic sent to."""

    application: str
    topic: str
    destination: str
    partition_count: int
    carrier: str
    epoch: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)


class PinStore:
    """The pins of one checkpoint."""

    def __init__(self, directory: HadoopDirectory, checkpoint: HadoopDirectory) -> None:
        self._directory, self._checkpoint = directory, checkpoint

    def agree(self, wanted: RelayPin, partition_count: int | None) -> RelayPin:
        """What counts from now on; `wanted` has the destination's present number of partitions.

        `partition_count` is what was asked for by name, None for what is pinned. The first use, and a raised epoch,
        pin. Raises RelayPinned, RelayPinDamaged.
        """
        pinned = self.read()
        if pinned is None:
            if self._checkpoint.names("offsets"):
                path = self._directory.path_of("")
                raise RelayPinDamaged(path, "the checkpoint has batches, and nothing tells how they were sent")
            return self._write(wanted)
        fresh = "begin with a fresh checkpoint"
        for setting, ours, theirs in (
            ("--application", wanted.application, pinned.application),
            ("--to-topic", wanted.topic, pinned.topic),
            ("--to-carrier", wanted.carrier, pinned.carrier),
        ):
            if ours != theirs:
                raise RelayPinned(setting, ours, theirs, f"give that, or {fresh}")
        check_same(wanted, pinned)
        if wanted.epoch > pinned.epoch:
            self._check_settled(wanted.epoch, pinned.epoch)
            return self._write(wanted)
        if wanted.epoch < pinned.epoch:
            raise RelayPinned("--epoch", wanted.epoch, pinned.epoch, "an epoch only rises: give that")
        if partition_count not in {None, pinned.partition_count}:
            remedy = f"raise --epoch above {pinned.epoch} with it"
            raise RelayPinned("--partition-count", partition_count, pinned.partition_count, remedy)
        return pinned

    def read(self) -> RelayPin | None:
        """The pin of the highest epoch. Raises RelayPinDamaged."""
        epochs = sorted(int(found[1]) for found in map(_NAME.fullmatch, self._directory.names()) if found)
        if not epochs:
            return None
        name = f"epoch-{epochs[-1]}.json"
        try:
            told: dict[str, Any] = json.loads(self._directory.read(name))
            if told.pop("version") != _VERSION:
                raise RelayPinDamaged(self._directory.path_of(name), f"it is not of version {_VERSION}")
            return RelayPin(**told)
        except (ValueError, TypeError, KeyError) as error:
            raise RelayPinDamaged(self._directory.path_of(name), f"it is not what a relay writes ({error})") from error

    def _write(self, pin: RelayPin) -> RelayPin:
        name = f"epoch-{pin.epoch}.json"
        told = {"version": _VERSION, **asdict(pin), "sources": dict(pin.sources)}
        if not self._directory.create(name, json.dumps(told, indent=1)):
            raise RelayPinDamaged(self._directory.path_of(name), "the file system refused to make it")
        return pin

    def _check_settled(self, epoch: int, pinned: int) -> None:
        """Part of an unfinished batch may be in the topic under the old PID; under the new one it would be new."""
        last = [
            max(map(int, filter(str.isdigit, self._checkpoint.names(log))), default=-1)
            for log in ("offsets", "commits")
        ]
        if last[0] != last[1]:
            why = f"batch {last[0]} is not finished: run once with --epoch {pinned}, till it ends, then raise it"
            raise RelayPinned("--epoch", epoch, pinned, why)


def check_same(now: RelayPin, pinned: RelayPin) -> None:
    """Topics and logs are still those that they were. Raises RelayPinned for one that was made anew."""
    if now.destination != pinned.destination:
        remedy = f"topic {now.topic!r} was made anew and lacks what was sent before; begin with a fresh checkpoint"
        raise RelayPinned("--to-topic", now.destination, pinned.destination, remedy)
    for name, incarnation in now.sources.items():
        if pinned.sources.get(name, incarnation) != incarnation:
            remedy = f"source {name!r} was made anew, its offsets count from 0 again; begin with a fresh checkpoint"
            raise RelayPinned("--topic", incarnation, pinned.sources[name], remedy)
