"""Old segments are removed at an operator's request: by the open outbox, or in a directory that no process has open.

What a destination that was used once, a replica in the in-sync set, a lease or a derived store needs stays, and the
answer names the reader that needs it.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.kafka.progress import ShippingProgress, read_progress
from pushrep.log import LogConfig, LogLocked, SegmentLog, list_logs
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import log_name
from pushrep.log.retention import NeededFrom
from pushrep.outbox.identity import read_identity
from pushrep.outbox.positions import POSITIONS_NAME, PositionsStore
from pushrep.settings import whole_number


def purge_open(logs: Mapping[int, SegmentLog], arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The control call: `partition` (None: all), `before_offset` or `before_ms`, `dry_run`. Raises BadArgument."""
    only, offset, time_ms = (arguments.get(name) for name in ("partition", "before_offset", "before_ms"))
    for name, value in (("partition", only), ("before_offset", offset), ("before_ms", time_ms)):
        if value is not None:
            whole_number(name, value)
    if only is not None and only not in logs:
        raise BadArgument("partition", f"{only} is not one of the {len(logs)}, counted from 0")
    chosen = logs.values() if only is None else [logs[only]]
    return _purge(chosen, offset, time_ms, is_dry_run=bool(arguments.get("dry_run")))


def purge_closed(  # noqa: PLR0913 - what goes, and where it stands
    directory: Path,
    topic: str | None,
    partition: int | None,
    *,
    before_offset: int | None,
    before_ms: int | None,
    dry_run: bool,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> list[dict[str, Any]]:
    """The same in a directory of logs that nobody has open. topic, partition: one log, None: all of them.

    Raises LogLocked, BadArgument for a node's copies, and what opening a log raises.
    """
    if filesystem.exists(directory / "promises.json") and read_identity(filesystem, directory) is None:
        raise BadArgument("directory", f"{directory} is a copy that a node keeps: use pushrep recording purge")
    held = LogDirectory.acquire(directory, filesystem, clock)
    try:
        if held.references > 1:
            raise LogLocked(held.path, held.owner_pid, is_own=True)
        identity, known = read_identity(filesystem, held.path), read_progress(filesystem, held.path)
        found = []
        for name, number in sorted(list_logs(held.path, filesystem)):
            if (topic, partition) not in {(None, None), (name, number)}:
                continue
            path = held.path / log_name(name, number)
            is_ours = identity is not None and name == identity.topic
            carrier = identity.carrier if identity is not None else "key"
            derived = [PositionsStore(path / POSITIONS_NAME, carrier, filesystem)] if is_ours else []
            with SegmentLog.open(
                path,
                LogConfig(),
                derived=derived,
                holders=_holders(known, number) if is_ours else {},
                has_replicas=identity is not None and bool(identity.replicas),
                filesystem=filesystem,
                clock=clock,
            ) as log:
                found += _purge([log], before_offset, before_ms, is_dry_run=dry_run)
        return found
    finally:
        held.release()


def _purge(
    logs: Iterable[SegmentLog], before_offset: int | None, before_ms: int | None, *, is_dry_run: bool
) -> list[dict[str, Any]]:
    if (before_offset is None) == (before_ms is None):
        raise BadArgument("before", "give an offset or a time")
    answers = []
    for log in logs:
        purged = log.purge_old(before_offset=before_offset, before_ms=before_ms, dry_run=is_dry_run)
        answers.append(
            {
                "log": log_name(log.topic, log.partition),
                "segments": [segment.base_offset for segment in purged.segments],
                "size_bytes": purged.size_bytes,
                "log_start_offset": purged.log_start_offset,
                "kept_by": purged.kept_by,
                "needed_from": purged.needed_from,
            }
        )
    return answers


def _holders(known: Mapping[str, ShippingProgress], partition: int) -> dict[str, NeededFrom]:
    """What each destination that was used once has not acknowledged."""
    return {
        f"kafka:{topic}": partial(int, at.acknowledged if (at := progress.partitions.get(partition)) else 0)
        for topic, progress in known.items()
    }
