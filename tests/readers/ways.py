"""Every way by which records leave a log, in one table, each as a function that reads one small log once.

    Way.open(log, directory) ──▶ read(starts) ──▶ Given(start, end, records, error), TimeFound(...), ...

A way that is not in the table fails tests/house/test_reading_ways.py: what gives records and is public is named there.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple
from uuid import UUID

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant, Member
from pushrep.election.leader import PartitionLeader
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.errors import PushrepError
from pushrep.kafka.source import ShippedPartition
from pushrep.log import CorruptBatch, CorruptLog, LogDamaged, SegmentLog
from pushrep.records import CorruptRecordBatch, RecordBatch
from pushrep.replay import (
    FOLLOW,
    TO_END,
    AtTime,
    NodeAccess,
    ReplayClient,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
)
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.access import Access, Kept
from pushrep.replicate.led_partition import LedPartition
from pushrep.replicate.member_clients import MemberClients, tp_of
from pushrep.replicate.node_calls import NodeCalls
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.node_store import NodeStore
from pushrep.replicate.pusher import MemoryTracker, Pusher
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import encode, open_frame
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameLimits, FrameReader
from pushrep.wire.push_messages import AppendRecordsRequest, DescribeLogRequest
from pushrep.wire.values import FileSlice
from tests.ports import reserve
from tests.readers.batch_bytes import RawRecord, parse_batches
from tests.readers.small_logs import CONFIG, FIRST_MS, LOG_ID, NAME, TOPIC, SmallLog

TP = TopicIdPartition(LOG_ID, TOPIC, 0)
LOCAL = "local"


class SilentEnd(Exception):
    """The reader ended early without an error."""


class Given(NamedTuple):
    """The records that came of [start, end), and how it ended: None is "that was all"."""

    start: int
    end: int
    records: list[RawRecord]
    error: Exception | None = None


class TimeFound(NamedTuple):
    """The result of a look-up by time."""

    timestamp_ms: int
    offset: int | None
    error: Exception | None = None


@dataclass(frozen=True)
class Way:
    """`open(log, directory)`: a context manager that gives `read(starts)`; `starts` are offsets to begin at.

    functions: the public ones of the product that it goes through, for the house test.
    is_dear: a node looks again and again before it calls a log damaged, so that the short form flips fewer bits.
    """

    name: str
    open: Callable
    functions: tuple[str, ...]
    is_dear: bool = False

    def __str__(self):
        return self.name


def is_named_damage(error):
    """Whether the error reports damage of the log."""
    if isinstance(error, ReplayFailed | ReplayRefused):
        return error.code is ErrorCode.CORRUPT_MESSAGE
    if isinstance(error, NodeUnreachable):
        return error.why.startswith(("it gave no records", "it sent broken batches"))
    return isinstance(error, CorruptBatch | CorruptRecordBatch | CorruptLog | LogDamaged)


def fault_of(log: SmallLog, found) -> str | None:  # noqa: PLR0911 - one for each kind of wrong
    """What is wrong with an answer; None if it is right, or right up to a named error."""
    error = found.error
    if error is not None and not is_named_damage(error):
        return f"{type(error).__name__}: {error}"
    if isinstance(found, TimeFound):
        wanted = log.first_since(found.timestamp_ms)
        if error is None and found.offset != wanted:
            return f"the first record at {found.timestamp_ms - FIRST_MS} ms is said to be {found.offset}, not {wanted}"
        return None
    wanted = log.between(found.start, found.end)
    for got, true in zip(found.records, wanted, strict=False):
        if got != true:
            return f"from {found.start} on: {got.offset} came where {true.offset} stands: {got}"
    if len(found.records) > len(wanted):
        return f"from {found.start} on: {len(found.records) - len(wanted)} records more than there are"
    if len(found.records) < len(wanted) and error is None:
        return f"from {found.start} on: a silent end at {wanted[len(found.records)].offset}"
    return None


def raw(record):
    return RawRecord(record.offset, record.timestamp_ms, record.key, record.value, tuple(map(tuple, record.headers)))


def collected(start, end, records):
    """Records up to the error that ends them."""
    got = []
    try:
        got.extend(raw(record) for record in records())
    except (PushrepError, OSError) as error:
        return Given(start, end, got, error)
    return Given(start, end, got)


def in_range(batches, start, end):
    for batch in batches:
        header = batch.header
        for record in RecordBatch.check(bytes(batch.data)).records():
            assert header.base_offset <= record.offset < header.next_offset
            if start <= record.offset < end:
                yield record


def parsed(parts):
    """Bytes that hold whole batches, one piece after the other."""
    for data in parts:
        at = 0
        while at < len(data):
            batch = RecordBatch.check(data[at : at + int.from_bytes(data[at + 8 : at + 12]) + 12])
            at += len(batch.data)
            yield batch


# ---- readers of a directory


def reads_of(log, opened, starts):
    for start in starts:
        yield collected(start, log.end, lambda start=start: opened.records(start))
        middle = min(log.end, start + 5)
        yield collected(start, middle, lambda start=start, end=middle: opened.records(start, end))
        yield collected(start, log.end, lambda start=start: in_range(opened.batches(start), start, log.end))
        yield collected(
            start, log.end, lambda start=start: in_range(parsed(_reads(opened, start, log.end)), start, log.end)
        )


def _reads(opened, offset, end):
    while offset < end:
        data = opened.read(offset, 150)
        if not data:
            return
        yield data
        offset = parse_batches(data)[-1].next_offset


def times_of(log, opened):
    for timestamp_ms in {FIRST_MS, *(record.timestamp_ms for record in log.records), FIRST_MS + 1_000}:
        try:
            yield TimeFound(timestamp_ms, opened.offset_for_timestamp(timestamp_ms))
        except (PushrepError, OSError) as error:
            yield TimeFound(timestamp_ms, None, error)


@contextmanager
def reader(log, _directory):
    def read(starts):
        with SegmentLog.open_reader(log.path) as opened:
            yield from reads_of(log, opened, starts)

    yield read


@contextmanager
def reader_by_time(log, _directory):
    def read(_starts):
        with SegmentLog.open_reader(log.path) as opened:
            yield from times_of(log, opened)

    yield read


@contextmanager
def writer(log, _directory):
    """The process that has the log open while a bit of it rots."""
    with SegmentLog.open(log.path, CONFIG) as opened:

        def read(starts):
            yield from reads_of(log, opened, starts)
            yield from times_of(log, opened)

        yield read


# ---- replays


def replayed(log, client, request, start):
    got = []
    try:
        with client.replay(request) as replay:
            got.extend(map(raw, replay))
    except (PushrepError, OSError) as error:
        return Given(start, log.end, got, error)
    return Given(start, log.end, got)


def followed(log, client, start, polls=20):
    """A replay that does not end: what it gives before it has given nothing for so many times."""
    got, idle = [], 0
    try:
        with client.replay(ReplayRequest(NAME, start, FOLLOW)) as replay:
            while replay.position < log.end and idle < polls:
                more = replay.poll()
                got += map(raw, more)
                idle = 0 if more else idle + 1
    except (PushrepError, OSError) as error:
        return Given(start, log.end, got, error)
    return Given(start, log.end, got, SilentEnd(f"it waits at {replay.position}") if idle == polls else None)


@contextmanager
def directory_replay(log, _directory):
    with ReplayClient(log.path.parent) as client:

        def read(starts):
            for start in starts:
                yield replayed(log, client, ReplayRequest(NAME, start, TO_END), start)
            yield followed(log, client, starts[0])

        yield read


@contextmanager
def directory_replay_by_time(log, _directory):
    with ReplayClient(log.path.parent) as client:

        def read(starts):
            for start in starts:
                timestamp_ms = FIRST_MS + 10 * start
                since = log.first_since(timestamp_ms)
                if since is not None:
                    yield replayed(log, client, ReplayRequest(NAME, AtTime(timestamp_ms), TO_END), since)

        yield read


@contextmanager
def node_replay(log, _directory):
    """The same over the network, from a node whose copy rots while the node runs: `log` is that copy."""
    with ExitStack() as opened:
        port = opened.enter_context(reserve()).getsockname()[1]
        replay = ReplaySettings(connect_timeout_ms=60_000, liveness_timeout_ms=60_000)
        settings = NodeSettings(
            address=Address("127.0.0.1", port), allow=frozenset({"any"}), replay=replay, log_config=CONFIG
        )
        node = opened.enter_context(ReplicaNode(log.path.parents[1], settings))
        access = NodeAccess(backoff_min_ms=1, backoff_max_ms=20, connect_timeout_ms=60_000)
        client = opened.enter_context(ReplayClient(str(node.address), node=access))

        def read(starts):
            for start in starts:
                yield replayed(log, client, ReplayRequest(NAME, start, TO_END), start)

        yield read


@contextmanager
def fetching(log, directory):
    """What a member that is to lead, and holds nothing, fetches of one whose copy rots."""
    numbers = count(1)
    with ExitStack() as opened:
        port = opened.enter_context(reserve()).getsockname()[1]
        settings = NodeSettings(address=Address("127.0.0.1", port), allow=frozenset({"any"}), log_config=CONFIG)
        node = opened.enter_context(ReplicaNode(log.path.parents[1], settings))

        def read(_starts):
            path, error = directory / f"candidate-{next(numbers)}" / NAME, None
            with SegmentLog.open(path, CONFIG, log_id=LOG_ID, has_replicas=True) as own:
                asking = MemberClients(UUID(log.path.parent.name), 0, [tp_of(own)], PushSettings())
                try:
                    asking.describe(1, node.address)
                    for batches in asking.fetch(node.address, own, 256, log.end):
                        own.append_as_is(batches)
                except (PushrepError, OSError) as failure:
                    error = failure
            yield judged_copy(log, path, error)

        yield read


# ---- to a fresh replica


@contextmanager
def push(log, directory):
    """Real pushes to what a node is behind its sockets, frame by frame."""
    settings = NodeSettings(address=Address("127.0.0.1", 1), allow=frozenset({"any"}), log_config=CONFIG)
    store = NodeStore(directory / "node", settings, REAL_FILESYSTEM, SYSTEM_CLOCK)
    nothing = Kept(directory, frozenset(), frozenset(), is_led_here=False)
    access = Access(settings.rules, lambda _outbox_id: nothing, REAL_FILESYSTEM, SYSTEM_CLOCK)
    answers = NodeCalls(store, settings.address, access, str)
    opened = SegmentLog.open(log.path, CONFIG, has_replicas=True)
    numbers = count(1)
    try:

        def read(_starts):
            yield pushed(log, opened, store, answers, UUID(int=next(numbers)))

        yield read
    finally:
        opened.close()
        store.close()


class Nobody:
    """Whom a partition tells that there is something to push: here that is done without being told."""

    def on_leader_append(self, *_): ...
    def wake(self, *_, **__): ...
    def record_follower_not_caught_up(self, *_): ...
    def record_refusal(self, *_): ...


def pushed(log, opened, store, answers, outbox_id):
    epoch = 256
    grant = Grant(
        outbox_id=outbox_id, epoch=epoch, leader=0, members=(Member(0), Member(1)), min_insync_replicas=2,
        members_epoch=epoch, pid_epoch=0, topic_id=LOG_ID, topic=TOPIC, partitions=1, carrier="key",
    )  # fmt: skip
    end = opened.log_end_offset
    leader = PartitionLeader(
        grant,
        LogEnds(opened.log_start_offset, end, opened.leader_epochs.assigned(epoch, end)),
        flushed_offset=end, high_watermark=0, flushed_only=False, now_ms=0,
    )  # fmt: skip
    led = LedPartition(TP, opened, leader, Nobody(), lambda *_: None)
    described = answers.answer(DescribeLogRequest(outbox_id=outbox_id, create=True, partitions=(TP,)), LOCAL)
    session = led.start_session(
        Replica(1, Address("127.0.0.1", 1)), described.replica_epoch, 1, described.logs[0].log_ends()
    )
    pusher, error = Pusher(session, MemoryTracker(1 << 20)), None
    try:
        while session.ended is None and pusher.has_something():
            found = pusher.next_part(200, file_bytes_max=400)
            if found is None:
                break
            part, sent, _ = found
            request = over_the_wire(AppendRecordsRequest(partitions=(part,)))
            (result,) = answers.answer(request, LOCAL).results
            pusher.on_result(sent, result)
            error = result
    except (PushrepError, OSError) as failure:
        return given_copy(log, store, outbox_id, failure)
    ended = None
    if session.ended is not None:
        named = error.error_code in {ErrorCode.CORRUPT_MESSAGE, ErrorCode.UNSUPPORTED_VERSION}
        ended = CorruptRecordBatch(session.ended.name) if named else SilentEnd(f"{session.ended} by {error}")
    return given_copy(log, store, outbox_id, ended)


def over_the_wire(message):
    """As the other end gets it: files read, bytes decoded."""
    parts = encode(message, 1)
    whole = [
        part.file.read_at(part.size_bytes, part.position) if isinstance(part, FileSlice) else part for part in parts
    ]
    (frame,) = FrameReader(open_frame, FrameLimits()).feed(b"".join(map(bytes, whole)))
    return frame.message


def given_copy(log, store, outbox_id, error):
    """What a replica holds, by its bytes alone, against what the leader's bytes were before."""
    kept = store.outbox(outbox_id)
    kept.close()
    return judged_copy(log, kept.directory / NAME, error)


def judged_copy(log, path, error):
    batches = [batch for path in sorted(path.glob("*.log")) for batch in parse_batches(path.read_bytes())]
    held = [record for batch in batches for record in batch.records]
    ends = [(batch.base_offset, batch.next_offset) for batch in batches]
    assert ends == [(batch.base_offset, batch.next_offset) for batch in log.batches[: len(ends)]], f"it holds {ends}"
    return Given(0, log.end, held, error)


# ---- to a topic


@contextmanager
def shipping(log, _directory):
    """The sealed batches as shipping hands them to its producer, before offsets and sequences are patched."""
    with SegmentLog.open(log.path, CONFIG) as opened:

        def read(starts):
            for start in {0, *starts[:1]}:
                at = next(batch.base_offset for batch in log.batches if batch.next_offset > start)
                yield collected(at, log.end, lambda at=at: in_range(shipped(opened, at), at, log.end))

        yield read


def shipped(opened, start):
    source = ShippedPartition(opened, start, 0)
    source.poll()
    while (sent := source.next_piece(1 << 20)) is not None:
        assert (sent.start, sent.end) == (sent.batch.header.base_offset, sent.batch.header.next_offset)
        yield sent.batch
    if source.poll():
        raise SilentEnd(f"shipping stands at {source.next_offset}")


# ---- into Spark


@contextmanager
def spark_source(log, _directory):
    """What a task of the source reads on an executor."""
    from spark_jobs.sources.arrow import source_schema
    from spark_jobs.sources.datasource import TaskRange, read_range
    from spark_jobs.sources.options import SourceOptions

    options = SourceOptions.parse({"path": str(log.path.parent), "topic": TOPIC, "includeHeaders": "true"})
    schema = source_schema(include_headers=True)

    def records(start, end):
        for rows in read_range(options, schema, TaskRange(0, start, end, str(LOG_ID))):
            for row in rows.to_pylist():
                headers = tuple((header["key"], header["value"]) for header in row["headers"] or ())
                time_ms = round(row["timestamp"].timestamp() * 1000)
                yield RawRecord(row["offset"], time_ms, row["key"], row["value"], headers)

    def read(starts):
        for start in {0, *starts}:
            yield collected_raw(start, log.end, lambda start=start: records(start, log.end))

    yield read


def collected_raw(start, end, records):
    got = []
    try:
        got.extend(records())
    except (PushrepError, OSError) as error:
        return Given(start, end, got, error)
    return Given(start, end, got)


_LOG_READER, _SEGMENT_LOG = "pushrep.log.reader.LogReader.", "pushrep.log.segment_log.SegmentLog."
_REPLAY = "pushrep.replay.replay.Replay"
WAYS = (
    Way(
        "reader",
        reader,
        (
            f"{_LOG_READER}records", f"{_LOG_READER}batches", "pushrep.log.reader.BatchReader.records",
            "pushrep.log.reader.BatchReader.batches",
        ),
    ),
    Way("reader by time", reader_by_time, ()),
    Way("writer", writer, (f"{_SEGMENT_LOG}records", f"{_SEGMENT_LOG}batches")),
    Way(
        "directory replay",
        directory_replay,
        (
            f"{_REPLAY}.__iter__", f"{_REPLAY}.__aiter__", f"{_REPLAY}.batches", f"{_REPLAY}.poll",
            f"{_REPLAY}.next_batch", f"{_REPLAY}.next_batch_async", f"{_REPLAY}Batches.__iter__",
            f"{_REPLAY}Batches.__aiter__", f"{_REPLAY}edBatch.records", "pushrep.replay.client.ReplayClient.replay",
            "pushrep.replay.client.ReplayClient.attach",
            "pushrep.replay.local.LocalSession.step", "pushrep.replay.source.LogSource.batches",
            "pushrep.replay.consumer.ReplayedLog.fetch",
        ),
    ),
    Way("directory replay by time", directory_replay_by_time, ()),
    Way("node replay", node_replay, ("pushrep.replay.remote.RemoteSession.step",), is_dear=True),
    Way("fetching", fetching, ("pushrep.replicate.member_clients.MemberClients.fetch",), is_dear=True),
    Way("push", push, ()),
    Way(
        "shipping",
        shipping,
        (
            "pushrep.kafka.source.SealedReader.read", "pushrep.kafka.source.ShippedPartition.next_piece",
        ),
    ),
    Way(
        "Spark's source",
        spark_source,
        (
            "spark_jobs.sources.datasource.read_range", "spark_jobs.sources.datasource.PushrepReader.read",
            "spark_jobs.sources.datasource.PushrepStreamReader.read",
        ),
    ),
)  # fmt: skip

NO_LOG_IS_READ = frozenset(
    {
        "pushrep.log.batching.to_batches",
        "pushrep.kafka.parking.ParkingLog.record",
        "pushrep.kafka.resume.whole_batches",
        "spark_jobs.sources.arrow.ArrowWriter.convert",
    }
)
"""They make batches, or are handed those that another has read."""
