"""`pushrep startpoint export`: prints pending startpoints as options of Spark's Kafka source, for a query with a new
checkpoint.

No broker is asked: an offset, -2 earliest, -1 latest; or startingOffsetsByTimestamp if every partition starts at a
time. A number of records from the consumer's position needs a checkpoint of the consumer in the store, else it is
refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import click

from pushrep.cli.startpoint_options import partitions_of, store_of, with_store
from pushrep.log.directory_files import shown_name
from pushrep.startpoints import (
    Kind,
    OutOfRange,
    Reader,
    ReaderState,
    StartpointRefused,
    State,
)
from pushrep.status.terminal import show_json

_EARLIEST, _LATEST = -2, -1
_ENDS = {Kind.EARLIEST: _EARLIEST, Kind.BOOTSTRAP: _EARLIEST, Kind.LATEST: _LATEST}


@click.command(short_help="Print options for a fresh Spark checkpoint.")
@with_store
@click.argument("topic")
@click.option("--consumer", required=True, help="The consumer whose startpoints are printed.")
@click.option(
    "--partitions",
    type=click.IntRange(1),
    help="The number of partitions of TOPIC.  [default: the partitions that have logs in DIRECTORY]",
)
@click.option(
    "--default",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where partitions start that have neither a startpoint nor a checkpoint.",
)
@click.option(
    "--remove",
    is_flag=True,
    help="Mark the exported startpoints as consumed, so that the consumer does not apply them.",
)
def export(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, topic: str, consumer: str, partitions: int | None, default: str,
    remove: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Print options for a Spark query with a new checkpoint: one JSON object, {option name: option value}.

    \b
      pushrep startpoint export out orders --consumer billing --partitions 4
      {"startingOffsets": "{\\"orders\\": {\\"0\\": 23, \\"1\\": -2, \\"2\\": -2, \\"3\\": -2}}"}
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    opened = store_of(directory, store)
    opened.sweep()
    numbers = list(range(partitions)) if partitions is not None else partitions_of(directory, topic)
    if not numbers:
        raise StartpointRefused(f"{directory} holds no log of {topic}: give its number of partitions, --partitions N")
    pending = {n: opened.read(consumer, topic, n) for n in numbers}
    for n, found in pending.items():
        if found is not None and found.state is State.FAILED:
            raise StartpointRefused(
                f"startpoint {found.sequence} failed at {shown_name(topic, n)}: {found.failure}; cancel it first"
            )
    stands_at = {n: opened.checkpoint(Reader(consumer, topic, n)).offset for n in numbers}
    options = kafka_words(topic, pending, stands_at, default)
    if remove:
        for n, found in pending.items():
            if found is not None:
                opened.read(consumer, topic, n, remove=True)
    show_json(options)


def kafka_words(
    topic: str, pending: Mapping[int, ReaderState | None], stands_at: Mapping[int, int | None], default: str
) -> dict[str, str]:
    """The options of Spark's Kafka source, which accepts offsets or times, not both. Raises StartpointRefused."""
    times, offsets, policies = {}, {}, set()
    for n, found in pending.items():
        if found is not None and (ms := _time_ms(found)) is not None:
            times[n] = ms
            policies.add(found.written.startpoint.out_of_range)
        else:
            offsets[n] = _kafka_offset(topic, n, found, stands_at[n], default)
    if not times:
        return {"startingOffsets": _by_partition(topic, offsets)}
    # A partition without a time can only start at the earliest offset there: time 0.
    others = [n for n, offset in offsets.items() if offset != _EARLIEST]
    if others:
        raise StartpointRefused(
            f"{topic}: partition {others[0]} starts at an offset and partition {min(times)} at a time, which Spark's "
            "Kafka source can't mix: set startpoints with offsets for all partitions, or with times for all"
        )
    if len(policies) > 1 or OutOfRange.EARLIEST in policies:
        raise StartpointRefused(
            f"{topic}: Spark's Kafka source has one policy for times without a record, error or latest; "
            f"these startpoints have --out-of-range {', '.join(sorted(policies))}: set them again with the same one"
        )
    return {
        "startingOffsetsByTimestamp": _by_partition(topic, times | dict.fromkeys(offsets, 0)),
        "startingOffsetsByTimestampStrategy": str(policies.pop()),
    }


def _time_ms(found: ReaderState) -> int | None:
    startpoint = found.written.startpoint
    if found.applied is not None or startpoint.value is None:
        return None
    if startpoint.kind is Kind.RELATIVE_MS:
        return max(0, found.written.created_ms + startpoint.value)
    return startpoint.value if startpoint.kind is Kind.TIMESTAMP else None


def _kafka_offset(topic: str, n: int, found: ReaderState | None, checkpoint: int | None, default: str) -> int:
    if found is None:
        return checkpoint if checkpoint is not None else _EARLIEST if default == "earliest" else _LATEST
    if found.applied is not None:
        return found.applied.offset
    startpoint = found.written.startpoint
    if startpoint.kind in _ENDS:
        return _ENDS[startpoint.kind]
    if startpoint.kind is Kind.RELATIVE_RECORDS and checkpoint is not None and startpoint.value is not None:
        return max(0, checkpoint + startpoint.value)
    if startpoint.value is None or startpoint.kind is not Kind.SPECIFIC_OFFSET:
        raise StartpointRefused(
            f"{shown_name(topic, n)}: startpoint {found.sequence}, {startpoint}, needs a checkpoint of the consumer, "
            "and the store has none: set an offset instead"
        )
    return startpoint.value


def _by_partition(topic: str, values: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(n): value for n, value in sorted(values.items())}})
