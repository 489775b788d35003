"""`pushrep marks`: the marks of a foreachBatch query, shown, exported and imported.

    a directory, or a URL of one    FileMarks    (a URL of another file system starts Spark)
    postgresql://..., sqlite:       SqlTable     with --table

A store is its query's own: stop the query before an import. What is imported:

    an export             one batch's bytes (docs/internals/formats/batch-marks.md)
    SQE's JSON            {"highWatermarks": {"<pid, hex>-<partition, hex>": {"watermark": n, "timestamp": seconds}}}
    --from-checkpoint     the state of a query with filter_replays (keyed_state.py)

SQE keeps that JSON in ZooKeeper; a pid is 64 bits in two's complement, or has a sign.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from filtering.marks import UNKNOWN, HighwaterMarks, select_rows
from filtering.stream_metadata import OFFSET_MAX, PARTITION_MAX
from pushrep.status.terminal import show_result
from spark_jobs.batch_marks import BatchMarks, MarksKey, MarksStore, MarksStoreDamaged
from spark_jobs.errors import MarksMissing
from spark_jobs.marks_stores import (
    BATCHES_SHOWN,
    batch_of,
    in_spark,
    is_database,
    marks_of,
    opened,
    owner_of,
    why_unreadable,
)

_TABLE = click.option("--table", help="The table of the rows, for a database's URL.")
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
_PAIR = re.compile(r"(-?[0-9]+):([0-9]+)=(-1|[0-9]+)")
_SQE_PAIR = re.compile(r"(-?)([0-9a-fA-F]{1,16})-([0-9a-fA-F]{1,8})")
IMPORTED = "imported"
"""The query to which marks belong that come from no query, in an empty store."""


class Pair(NamedTuple):
    """One pair, as the command line names it. offset: its mark; -1: none."""

    pid: int
    partition: int
    offset: int


def pair_and_offset(text: str) -> Pair:
    """PID:PARTITION=OFFSET."""
    found = _PAIR.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not PID:PARTITION=OFFSET")
    pair = Pair(*map(int, found.groups()))
    if not -(2**63) <= pair.pid < 2**63 or pair.partition > PARTITION_MAX or pair.offset > OFFSET_MAX:
        raise click.BadParameter(f"{text!r} has a number that is too large")
    return pair


def sqe_marks(data: bytes) -> HighwaterMarks:
    """The marks in SQE's JSON. Raises MarksStoreDamaged, which names the entry."""
    try:
        told = json.loads(data, object_pairs_hook=_each_name_once)
    except (ValueError, RecursionError) as error:
        raise MarksStoreDamaged(f"SQE's marks: they are no JSON ({error})") from error
    held = told.get("highWatermarks") if isinstance(told, dict) else None
    if not isinstance(held, dict):
        raise MarksStoreDamaged("SQE's marks: they have no object highWatermarks")
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    for name, entry in held.items():
        found = _SQE_PAIR.fullmatch(name)
        number: Any = entry.get("watermark") if isinstance(entry, dict) else None
        seconds = entry.get("timestamp") if isinstance(entry, dict) else None
        if found is None or not _is_whole(number, OFFSET_MAX) or not (seconds is None or _is_time(seconds)):
            raise MarksStoreDamaged(f"SQE's marks: {name[:60]!r}: {str(entry)[:100]} is no pair and mark")
        digits = int(found[2], 16)
        pid = -digits if found[1] else digits - (digits >> 63 << 64)
        pair = pid, int(found[3], 16)
        if pair in rows or pid < -(2**63) or pair[1] > PARTITION_MAX:
            why = "stands twice" if pair in rows else "is out of range"
            raise MarksStoreDamaged(f"SQE's marks: the pair {name!r} {why}")
        rows[pair] = number, UNKNOWN if seconds is None else int(seconds * 1000)
    pids, partitions = ([pair[n] for pair in rows] for n in (0, 1))
    offsets, times = ([row[n] for row in rows.values()] for n in (0, 1))
    return HighwaterMarks.from_columns(pids, partitions, offsets, advanced_ms=times)


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _is_whole(number: Any, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= most


def _is_time(seconds: Any) -> bool:
    if isinstance(seconds, float):
        return math.isfinite(seconds) and 0 <= seconds * 1000 <= OFFSET_MAX // 2
    return _is_whole(seconds, OFFSET_MAX // 1000)


@click.group()
def marks() -> None:
    """Marks of a Spark query: show, export, import.

    STORE is the directory of the marks (a job's --marks), or postgresql://HOST/DATABASE, sqlite:PATH with --table.
    """


@marks.command(short_help="Show the query, its batches and marks.")
@click.argument("store")
@_TABLE
@click.option("--batch", type=int, help="Which batch's ranges and marks.  [default: the last]")
@_JSON
def show(store: str, table: str | None, batch: int | None, as_json: bool) -> None:  # noqa: FBT001
    """The query, what its batches kept and dropped, and a batch's marks.

    \b
    pushrep marks show orders-checkpoint-marks
    pushrep marks show postgresql://db/shop --table orders --json
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _store(store, table) as found:
        location, query_id = found.location, owner_of(found)
        batches = found.batches(query_id)
        shown = _read(found, query_id, found.batches(query_id)[-1] if batch is None else batch)
        newest = [one for number in batches[-BATCHES_SHOWN:] if (one := found.read(query_id, number)) is not None]
    held = marks_of(shown)
    counted = [batch_of(one) for one in newest]
    last = {"batch": shown.batch_id, "ranges": [one._asdict() for one in shown.ranges], "marks": held}
    told = {"location": location, "query": query_id, "batches": batches, "counts": counted, "last": last}
    lines = chain(
        [f"{store}: query {query_id}, batches {_range(batches)}"],
        _table_of(counted),
        (f"  batch {shown.batch_id} read {read}" for read in shown.ranges),
        (f"  {one['topic']} pid {one['pid']} partition {one['partition']}: offset {one['offset']}" for one in held),
    )
    show_result(told, lines, as_json=as_json)


@marks.command(short_help="Write a batch's marks into a file.")
@click.argument("store")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_TABLE
@click.option("--batch", type=int, help="Which batch.  [default: the last]")
@_JSON
def export(store: str, file: Path, table: str | None, batch: int | None, as_json: bool) -> None:  # noqa: FBT001
    """Write a batch's marks into FILE, which must be new.

    \b
    pushrep marks export orders-checkpoint-marks orders.marks
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _store(store, table) as found:
        query_id = owner_of(found)
        wanted = _read(found, query_id, found.batches(query_id)[-1] if batch is None else batch)
    with _errors(), file.open("xb") as out:
        out.write(wanted.to_bytes())
    result = {"file": str(file), "query": query_id, "batch": wanted.batch_id, "marks": _count(wanted)}
    text = f"batch {wanted.batch_id} of query {query_id}: {_count(wanted)} marks written to {file}"
    show_result(result, [text], as_json=as_json)


@marks.command("import", short_help="Put an export, a pair or no marks in.")
@click.argument("store")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_TABLE
@click.option(
    "--pair",
    type=pair_and_offset,
    metavar="PID:PARTITION=OFFSET",
    help="One pair's mark: what is above OFFSET passes. -1 forgets the pair.",
)
@click.option("--topic", help="The topic of --pair  [default: the only one that STORE has], or of SQE's JSON.")
@click.option("--from-checkpoint", metavar="DIR", help="The marks of filter_replays in the checkpoint of its query.")
@click.option("--batch", type=click.IntRange(min=0), help="With it: as of this batch.  [default: the last whole one]")
@click.option("--empty", is_flag=True, help="No marks: every record passes once more.")
@click.option("--replace", "replaces", is_flag=True, help="Change the last batch's marks in a STORE that has some.")
@click.option("--dry-run", is_flag=True, help="Print what would be stored; write nothing.")
@_JSON
def import_(  # noqa: PLR0913, PLR0917 - one parameter an option
    store: str, file: Path | None, table: str | None, pair: Pair | None, topic: str | None,
    from_checkpoint: str | None, batch: int | None, empty: bool,  # noqa: FBT001
    replaces: bool, dry_run: bool, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Put an export, SQE's JSON, the state of a checkpoint, one pair's mark or no marks into STORE. Stop its query
    before.

    Into an empty STORE: a fresh checkpoint takes the marks over by --adopt. With --replace the marks of the last batch
    are changed, and the query continues with them; export them before. A pair may then come in any partition of its
    topic: one that has moved for good (PairSplit) keeps its mark if it is given that same mark.

    \b
    pushrep marks import new-checkpoint-marks orders.marks
    pushrep marks import orders-checkpoint-marks --pair 4711:0=16999 --replace --dry-run
    pushrep marks import new-checkpoint-marks --from-checkpoint orders-operator-checkpoint
    pushrep marks import new-checkpoint-marks sqe.json --topic orders
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (file is not None) + (pair is not None) + (from_checkpoint is not None) + empty != 1:
        raise click.UsageError("give one of FILE, --pair, --from-checkpoint and --empty")
    if batch is not None and from_checkpoint is None:
        raise click.UsageError("--batch belongs to --from-checkpoint")
    given = None if pair is not None else _given(file, topic, from_checkpoint, batch)
    with _store(store, table, to_write=True) as found:
        before = _before(found, store, replaces=replaces)
        changed = _whole(before, given, store) if pair is None else _with_pair(before, pair, topic, found.location)
        if not dry_run:
            found.write(changed, keep=1 << 30)
    adopt = f"{changed.query_id}:{changed.batch_id}"
    end = f"batch {changed.batch_id} of query {changed.query_id} has these marks now"
    if before is None:
        end = f"{_count(changed)} marks are in {store}: begin a fresh checkpoint with --adopt {adopt}"
    result = {"store": store, "adopt": adopt, "marks": _count(changed), "dry_run": dry_run}
    result["before"] = None if before is None else _count(before)
    lines = chain(_changes(before, changed), ["dry run: nothing was written" if dry_run else end])
    show_result(result, lines, as_json=as_json)


def _given(file: Path | None, topic: str | None, checkpoint: str | None, batch: int | None) -> BatchMarks | None:
    """What is imported whole; None where that is nothing. Raises UsageError, ClickException."""
    data = b"" if file is None else file.read_bytes()
    is_sqe = data.lstrip().startswith(b"{")
    if is_sqe == (topic is None):
        why = "SQE's JSON names no topic: say --topic" if is_sqe else "--topic belongs to --pair and to SQE's JSON"
        raise click.UsageError(why)
    with _errors():
        if topic is not None:
            return BatchMarks(IMPORTED, 0, marks={MarksKey(topic): sqe_marks(data)})
        if file is not None:
            return BatchMarks.from_bytes(data)
        if checkpoint is None:
            return None
        from spark_jobs.keyed_state import stored_marks  # noqa: PLC0415 - slow to import, and seldom needed

        with in_spark("marks") as session:
            return stored_marks(session, checkpoint, batch)


def _before(found: MarksStore, store: str, *, replaces: bool) -> BatchMarks | None:
    """The last batch of the store's query; None in an empty store. Raises ClickException."""
    owner = found.owner()
    if owner is None:
        return None
    if not replaces:
        raise click.ClickException(
            f"{store} has marks of query {owner}: name an empty place, or change them with --replace (--dry-run shows)"
        )
    if is_database(store):
        why = "a database commits marks with their rows: begin a fresh checkpoint by --adopt with an earlier batch"
        raise click.ClickException(f"{store.partition(':')[0]}: {why}")
    return _read(found, owner, found.batches(owner)[-1])


def _whole(before: BatchMarks | None, given: BatchMarks | None, store: str) -> BatchMarks:
    """The batch with all marks of `given`; with none, where that is None. Raises ClickException."""
    if before is not None:
        return replace(before, marks={} if given is None else given.marks)
    if given is None:
        raise click.ClickException(f"{store} has no marks: there is nothing to make empty")
    return replace(given, first=given.batch_id + 1)  # no batch of a query that has this store


def _with_pair(before: BatchMarks | None, pair: Pair, topic: str | None, location: str) -> BatchMarks:
    """The batch with this mark of the pair. Raises MarksMissing, ClickException."""
    if before is None:
        if topic is None or pair.offset < 0:
            raise click.ClickException("into an empty store give the pair's mark and --topic")
        mark = HighwaterMarks.from_columns([pair.pid], [pair.partition], [pair.offset])
        return BatchMarks(IMPORTED, 0, marks={MarksKey(topic): mark}, first=1)
    topics = {key.topic for key in before.marks}
    holding = {key.topic for key in before.marks if before.marks[key].get(pair.pid, pair.partition) is not None}
    chosen = {topic} if topic is not None else holding or topics
    if len(chosen) != 1 or not chosen <= topics:
        raise click.ClickException(f"say --topic: it is one of {', '.join(sorted(topics)) or 'none yet'}")
    if pair.offset < 0 and not chosen <= holding:
        raise MarksMissing(
            f"marks at {location}: batch {before.batch_id} of query {before.query_id} has no mark of pid {pair.pid} "
            f"partition {pair.partition}"
        )
    return replace(before, marks=_with(before.marks, chosen.pop(), pair))


def _with(marks_: Mapping[MarksKey, HighwaterMarks], topic: str, pair: Pair) -> dict[MarksKey, HighwaterMarks]:
    """With this mark of the pair, in a partition that is not known yet; without the pair, where its offset is below 0.

    At the mark that it has, what its window has seen stays; at another one all below counts as seen.
    """
    changed, mark = dict(marks_), HighwaterMarks.from_columns([pair.pid], [pair.partition], [max(pair.offset, 0)])
    for key in (key for key in marks_ if key.topic == topic):
        held = marks_[key].to_columns()
        rows = marks_[key].find(np.array([pair.pid]), np.array([pair.partition]))
        rows = rows[rows >= 0]
        changed[key] = marks_[key].without_rows(rows)
        if len(rows) and held.offsets[rows[0]] == pair.offset:
            own = select_rows(held, rows)
            mark = HighwaterMarks.from_columns(
                own.pids,
                own.partitions,
                own.offsets,
                advanced_ms=own.advanced_ms,
                bitmaps=own.bitmaps,
                window=own.window,
            )
    if pair.offset >= 0:
        # Wherever it is met: a partition that a startpoint reset takes no marks of startpoints before that one.
        newest = max(key for key in marks_ if key.topic == topic)
        changed[newest] = changed[newest].merge(mark)
    return changed


def _changes(before: BatchMarks | None, changed: BatchMarks) -> Iterator[str]:
    """Each pair whose mark differs, and from what to what."""
    old, new = (
        {(m["topic"], m["pid"], m["partition"]): m["offset"] for m in ([] if one is None else marks_of(one))}
        for one in (before, changed)
    )
    for topic, pid, partition in sorted(old.keys() | new.keys()):
        was, now = (held.get((topic, pid, partition), "none") for held in (old, new))
        if was != now:
            yield f"  {topic} pid {pid} partition {partition}: {was} -> {now}"


@contextmanager
def _errors() -> Iterator[None]:
    """What a store refuses, as the command line's one line."""
    try:
        yield
    except Exception as error:
        if (why := why_unreadable(error)) is None:
            raise
        raise click.ClickException(why) from error


@contextmanager
def _store(store: str, table: str | None, *, to_write: bool = False) -> Iterator[MarksStore]:
    with _errors(), opened(store, table, to_write=to_write) as found:
        yield found


def _read(store: MarksStore, query_id: str, batch_id: int) -> BatchMarks:
    found = store.read(query_id, batch_id)
    if found is None:
        raise MarksMissing(
            f"marks at {store.location}: batch {batch_id} is not there, {_range(store.batches(query_id))} are"
        )
    return found


def _count(batch: BatchMarks) -> int:
    return sum(map(len, batch.marks.values()))


def _range(batches: list[int]) -> str:
    return f"{batches[0]} to {batches[-1]}" if batches else "none"


_COLUMNS = {"batch": "batch", "rows": "rows", "kept": "kept", "dropped": "dropped", "jumped": "gaps",
            "unkeyed": "without metadata", "late": "late"}  # fmt: skip


def _table_of(counted: list[dict[str, Any]]) -> Iterator[str]:
    """The batches' counts as lines; `unknown` where nobody counted."""
    rows = [list(_COLUMNS.values())]
    rows += [["unknown" if one[name] is None else f"{one[name]:,}" for name in _COLUMNS] for one in counted]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
