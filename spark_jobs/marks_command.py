"""`pushrep marks`: the marks of a foreachBatch query, shown, exported, imported, set and reset.

    a directory                 LocalMarks   (holds marks-<generation>)
    another, or a URL of one    FileMarks    (holds *.marks; starts Spark for its file systems)
    postgresql://..., sqlite:   SqlTable     with --table

A store is its query's own: stop the query first. An export is one batch's bytes:
docs/internals/formats/batch-marks.md.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import click
import numpy as np

from filtering.marks import HighwaterMarks, select_rows
from filtering.stream_metadata import PARTITION_MAX
from pushrep.errors import PushrepError
from spark_jobs.batch_marks import BatchMarks, MarksKey
from spark_jobs.errors import SparkJobError
from spark_jobs.marks import KEEP_ALL, LocalMarks, MarksStore
from spark_jobs.marks_stores import NoSuchMarks, is_database, opened

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TABLE = click.option("--table", help="The table of the rows, for a database's URL.")
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


class PairKey(NamedTuple):
    """One pair, as the command line names it."""

    pid: int
    partition: int
    topic: str | None


def _pair(*, required: bool) -> Callable[[_Command], _Command]:
    """The options --pid, --partition and --topic as one argument `pair`; None where the first is not given."""

    def with_pair(command: _Command) -> _Command:
        @wraps(command)
        def given(*args: Any, pid: int | None, partition: int | None, topic: str | None, **rest: Any) -> Any:
            if (pid is None) != (partition is None) or (topic is not None and pid is None):
                raise click.UsageError("a pair is named by --pid and --partition together")
            pair = None if pid is None or partition is None else PairKey(pid, partition, topic)
            return command(*args, pair=pair, **rest)

        number, source = click.IntRange(-(2**63), 2**63 - 1), click.IntRange(0, PARTITION_MAX)
        options = (
            click.option("--pid", type=number, required=required, help="Producer id of one pair."),
            click.option("--partition", type=source, required=required, help="Its source partition."),
            click.option("--topic", help="Where several topics are read: which of them."),
        )
        for option in reversed(options):
            given = option(given)
        return cast("_Command", given)

    return with_pair


@click.group()
def marks() -> None:
    """Marks of a Spark query: show, export, import, set one, reset all.

    STORE is the directory of the marks (a job's --marks), or postgresql://HOST/DATABASE, sqlite:PATH with --table.
    Stop the query before: the marks are its own while it runs.
    """


@marks.command(short_help="Show the query, its batches and marks.")
@click.argument("store")
@_TABLE
@_pair(required=False)
@_JSON
def show(store: str, table: str | None, pair: "PairKey | None", as_json: bool) -> None:  # noqa: FBT001 - click's form
    """Whose the marks are, which batches there are, and what the last one holds.

    \b
    pushrep marks show orders-checkpoint-marks
    pushrep marks show postgresql://db/shop --table orders --json
    pushrep marks show orders-checkpoint-marks --pid 4711 --partition 0
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _store(store, table) as found:
        location, query_id = found.location, _owner(found)
        batches = found.batches(query_id)
        last = _as_dict(_read(found, query_id, batches[-1])) if batches else None
    if last is not None and pair is not None:
        last["marks"] = [
            mark for mark in last["marks"] if (mark["pid"], mark["partition"]) == (pair.pid, pair.partition)
        ]
        last["marks"] = [mark for mark in last["marks"] if pair.topic in {None, mark["topic"]}]
    if as_json:
        click.echo(json.dumps({"location": location, "query": query_id, "batches": batches, "last": last}))
        return
    click.echo(f"{store}: query {query_id}, batches {_range(batches)}")
    for line in _lines(last):
        click.echo(line)
    if last is not None and pair is not None and not last["marks"]:
        click.echo(f"  pid {pair.pid} partition {pair.partition}: no mark")


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
        query_id = _owner(found)
        wanted = _read(found, query_id, _last(found, query_id) if batch is None else batch)
    _write_new(file, wanted)
    result = {"file": str(file), "query": query_id, "batch": wanted.batch_id, "marks": _count(wanted)}
    text = f"batch {wanted.batch_id} of query {query_id}: {_count(wanted)} marks written to {file}"
    click.echo(json.dumps(result) if as_json else text)


@marks.command("import", short_help="Put an export into an empty store.")
@click.argument("store")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_JSON
def import_(store: str, file: Path, as_json: bool) -> None:  # noqa: FBT001
    """Put an export into an empty STORE, a directory: a fresh checkpoint takes it over by --adopt.

    \b
    pushrep marks import new-checkpoint-marks orders.marks
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _errors():
        imported = BatchMarks.from_bytes(file.read_bytes())
    with _errors(), LocalMarks(_local(store)) as found:
        if (owner := found.owner()) is not None:
            raise click.ClickException(f"{store} has marks of query {owner}: name an empty place, or reset it")
        found.write(imported, keep=KEEP_ALL)
    adopt = f"{imported.query_id}:{imported.batch_id}"
    text = f"{_count(imported)} marks are in {store}: begin a fresh checkpoint with --adopt {adopt}"
    click.echo(json.dumps({"store": store, "adopt": adopt, "marks": _count(imported)}) if as_json else text)


@marks.command("set", short_help="Set or forget the mark of one pair.")
@click.argument("store")
@_pair(required=True)
@click.option("--offset", type=click.IntRange(-1, 2**63 - 1), required=True,
              help="The new mark: what is above it passes. -1 forgets the pair.")  # fmt: skip
@click.option("--export", "export_to", required=True, type=click.Path(dir_okay=False, path_type=Path),
              help="A new file for the last batch's marks, written before one changes.")  # fmt: skip
@_JSON
def set_(store: str, pair: "PairKey", offset: int, export_to: Path, as_json: bool) -> None:  # noqa: FBT001
    """Set the mark of one pair, or forget it, in the last batch of a directory; the others stay.

    The pair may then come in any partition of the topic. So a pair that has moved for good (PairSplit) keeps its mark
    if it is set to that same mark.

    \b
    pushrep marks set orders-checkpoint-marks --pid 4711 --partition 0 --offset 16999 --export before.marks
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if is_database(store):
        raise click.ClickException(f"{store}: in a database no single pair is set; begin a fresh checkpoint by --adopt")
    with _store(store, None) as found:
        query_id = _owner(found)
        last = _read(found, query_id, _last(found, query_id))
        if not last.marks:
            raise NoSuchMarks(found.location, f"batch {last.batch_id} of query {query_id} has seen no pair")
        keys = [key for key in last.marks if pair.topic in {None, key.topic}]
        before = [key for key in keys if last.marks[key].get(pair.pid, pair.partition) is not None]
        if len(topics := {key.topic for key in before or keys}) != 1:
            raise click.ClickException(f"say --topic: it is one of {', '.join(sorted({k.topic for k in last.marks}))}")
        (topic,) = topics
        if offset < 0 and not before:
            why = f"batch {last.batch_id} of query {query_id} has no mark of pid {pair.pid} partition {pair.partition}"
            raise NoSuchMarks(found.location, f"{why}: nothing was changed")
        _write_new(export_to, last)
        changed = replace(last, marks=_with(last.marks, topic, pair, offset))
        found.write(changed, keep=KEEP_ALL)
    result = {
        "query": query_id,
        "batch": last.batch_id,
        "topic": topic,
        "offset": offset,
        "exported": str(export_to),
    }
    what = "forgotten" if offset < 0 else f"set to {offset}"
    text = f"{topic} pid {pair.pid} partition {pair.partition}: {what}; what was before is in {export_to}"
    click.echo(json.dumps(result) if as_json else text)


@marks.command(short_help="Forget all batches, after an export.")
@click.argument("store")
@_TABLE
@click.option("--export", "export_to", required=True, type=click.Path(dir_okay=False, path_type=Path),
              help="A new file for the last batch's marks, written before they go.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Don't ask.")
@_JSON
def reset(store: str, table: str | None, export_to: Path, yes: bool, as_json: bool) -> None:  # noqa: FBT001
    """Forget all batches' marks of the store's query, exporting the last first. Of a database's table rows go too.

    The query's checkpoint can't go on without its marks: begin a fresh one, which lets everything through once
    more, or adopts an imported export.

    \b
    pushrep marks reset orders-checkpoint-marks --export orders.marks
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _store(store, table) as found:
        query_id = _owner(found)
        batches = found.batches(query_id)
        last = _read(found, query_id, _last(found, query_id))
        if not yes:
            rows = " and their rows" if table else ""
            click.confirm(f"forget batches {_range(batches)} of query {query_id}{rows}?", abort=True, err=True)
        _write_new(export_to, last)
        while (owner := found.owner()) is not None:  # what one that it adopted left, too
            found.drop_from(owner, found.batches(owner)[0])
    result = {"query": query_id, "batches": batches, "exported": str(export_to)}
    text = f"query {query_id}: batches {_range(batches)} forgotten; the last one's marks are in {export_to}"
    click.echo(json.dumps(result) if as_json else text)


@contextmanager
def _errors() -> Iterator[None]:
    """What a store refuses, as the command line's one line."""
    try:
        yield
    except (SparkJobError, PushrepError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"psycopg", "sqlite3"}:  # of the extra that is loaded
            raise
        raise click.ClickException(f"the database of the marks: {error}") from error


@contextmanager
def _store(store: str, table: str | None) -> Iterator[MarksStore]:
    with _errors(), opened(store, table) as found:
        yield found


def _owner(store: MarksStore) -> str:
    query_id = store.owner()
    if query_id is None:
        raise NoSuchMarks(store.location, "it holds no marks")
    return query_id


def _last(store: MarksStore, query_id: str) -> int:
    batches = store.batches(query_id)
    if not batches:
        raise NoSuchMarks(store.location, f"it holds no batch of query {query_id} any more")
    return batches[-1]


def _read(store: MarksStore, query_id: str, batch_id: int) -> BatchMarks:
    found = store.read(query_id, batch_id)
    if found is None:
        raise NoSuchMarks(store.location, f"batch {batch_id} is not there, {_range(store.batches(query_id))} are")
    return found


def _with(
    marks_: Mapping[MarksKey, HighwaterMarks], topic: str, pair: PairKey, offset: int
) -> dict[MarksKey, HighwaterMarks]:
    """With this mark of the pair, in a partition that is not known yet; without the pair, where `offset` is below 0.

    At the mark that it has, what its window has seen stays; at another one all below counts as seen.
    """
    changed, mark = dict(marks_), HighwaterMarks.from_columns([pair.pid], [pair.partition], [max(offset, 0)])
    for key in (key for key in marks_ if key.topic == topic):
        held = marks_[key].to_columns()
        rows = marks_[key].find(np.array([pair.pid]), np.array([pair.partition]))
        rows = rows[rows >= 0]
        changed[key] = marks_[key].without_rows(rows)
        if len(rows) and held.offsets[rows[0]] == offset:
            own = select_rows(held, rows)
            mark = HighwaterMarks.from_columns(
                own.pids,
                own.partitions,
                own.offsets,
                advanced_ms=own.advanced_ms,
                bitmaps=own.bitmaps,
                window=own.window,
            )
    if offset >= 0:
        # Wherever it is met: a partition that a startpoint reset takes no marks of startpoints before that one.
        newest = max(key for key in marks_ if key.topic == topic)
        changed[newest] = changed[newest].merge(mark)
    return changed


def _write_new(file: Path, marks_: BatchMarks) -> None:
    try:
        with file.open("xb") as out:
            out.write(marks_.to_bytes())
    except OSError as error:
        raise click.ClickException(f"{file} can't be written: {error.strerror}; name a new file") from error


def _local(store: str) -> Path:
    if ":" in store.partition("/")[0]:
        raise click.ClickException(f"{store}: marks are imported into a directory of this machine")
    return Path(store)


def _count(batch: BatchMarks) -> int:
    return sum(map(len, batch.marks.values()))


def _range(batches: list[int]) -> str:
    return f"{batches[0]} to {batches[-1]}" if batches else "none"


def _as_dict(batch: BatchMarks) -> dict[str, Any]:
    pairs = [
        {
            "topic": key.topic,
            "startpoint_epoch": key.startpoint_epoch,
            "pid": pid,
            "partition": partition,
            "offset": entry.offset,
        }
        for key, marks_ in sorted(batch.marks.items())
        for (pid, partition), entry in marks_.items()
    ]
    return {"batch": batch.batch_id, "ranges": [r._asdict() for r in batch.ranges], "marks": pairs}


def _lines(last: dict[str, Any] | None) -> Iterator[str]:
    if last is None:
        return
    for r in last["ranges"]:
        yield f"  batch {last['batch']} read {r['topic']}-{r['partition']} [{r['start']}, {r['end']})"
    for mark in last["marks"]:
        yield f"  {mark['topic']} pid {mark['pid']} partition {mark['partition']}: offset {mark['offset']}"
