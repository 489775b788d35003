"""Where a Spark stream stands, read from its checkpoint while it runs: the JVM isn't asked, so it may die.

    checkpoint/offsets/7    written before batch 7 runs: the end of what it takes
    checkpoint/commits/7    written when it is done
    inside batch 7          the first is there and the second isn't

Files appear by rename, so a name means a whole file. Format: Spark's offset log, a version line, a line of metadata,
then one line of JSON per source: the source's own, that of `spark_jobs.sources.planning` or, for Kafka's, {topic:
{partition: offset}}.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path


def batches(directory: Path) -> Iterator[int]:
    """The batch numbers in a log directory of the checkpoint; none while it doesn't exist."""
    if directory.is_dir():
        yield from (int(path.name) for path in directory.iterdir() if path.name.isdigit())


def batch_inside(checkpoint: Path) -> int | None:
    """The batch that is planned and not committed; None between batches."""
    committed = max(batches(checkpoint / "commits"), default=-1)  # first: a commit in between then can't mislead
    planned = max(batches(checkpoint / "offsets"), default=-1)
    return planned if planned > committed and planned not in batches(checkpoint / "commits") else None


def committed_batch(checkpoint: Path) -> int | None:
    """The newest batch that is done."""
    return max(batches(checkpoint / "commits"), default=None)


def end_offsets(checkpoint: Path, batch: int) -> Mapping[int, int]:
    """Next offset per partition of the one log or topic after this batch; empty if the checkpoint was trimmed."""
    try:
        text = (checkpoint / "offsets" / str(batch)).read_text()
    except FileNotFoundError:
        return {}
    logged = json.loads(text.splitlines()[2])
    if "partitions" in logged:
        return {int(partition): position["offset"] for partition, position in logged["partitions"].items()}
    return {int(partition): offset for topic in logged.values() for partition, offset in topic.items()}
