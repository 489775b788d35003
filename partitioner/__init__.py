"""Partitioners that keep each source partition together: one destination partition for each (PID, source partition)."""

from pathlib import Path

import filtering

# Another package named `filtering`, the user's own say, would fail at some import below with a message that misleads.
_FOUND, _OURS = Path(filtering.__path__[0]), Path(__file__).parent.parent / "filtering"
if _OURS.is_dir() and _FOUND.resolve() != _OURS.resolve():
    raise ImportError(f"{_FOUND} hides the package 'filtering' of pushrep, {_OURS}: rename yours", name="filtering")

from partitioner.source_partition import (  # noqa: E402 - as above
    BadPartitionerSetting,
    NotDelivered,
    OffsetNotAbove,
    PartitionerError,
    PartitionStopped,
    SourcePartitionPartitioner,
    TopicUnfit,
    partition_for,
)

__all__ = [
    "BadPartitionerSetting",
    "NotDelivered",
    "OffsetNotAbove",
    "PartitionStopped",
    "PartitionerError",
    "SourcePartitionPartitioner",
    "TopicUnfit",
    "partition_for",
]
