"""Random logs full of replays, the rule by brute force, and frames that cut such logs the ways Spark may."""

import contextlib
import functools
import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from pyspark.sql.conf import RuntimeConfig

from filtering import METADATA_HEADER, StreamMetadata

SCHEMA = (
    "key binary, value string, topic string, partition int, offset bigint, "
    "headers array<struct<key: string, value: binary>>"
)
NO_METADATA = (None, b"", b"business", b"x" * 21, b"\0" * 8 + b"\xff" * 4 + b"\0" * 8, b"\0" * 12 + b"\x80" + b"\0" * 7)


@contextlib.contextmanager
def with_setting(spark, name, value):
    """A setting of the session, as its user may make it."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name) if before is None else spark.conf.set(name, before)


WATCHED = {
    "spark.sql.shuffle.partitions": "7",
    "spark.sql.sources.partitionOverwriteMode": "static",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "true",
}
"""Settings that change what a user's own frames do, with the user's values."""


class Watch:
    """Every value that a session had of the watched settings, read all the time by a thread of the user's."""

    def __init__(self, spark) -> None:
        self.wanted, self.seen, self.sets, self._stop = dict(WATCHED), set(), [], threading.Event()
        self._set = functools.partial(RuntimeConfig.set, spark.conf)

    def given(self, name, value):
        """Another value of the user's."""
        self._set(name, value)
        self.wanted[name] = value

    def look(self, session):
        self.seen |= {(name, session.conf.get(name)) for name in WATCHED}

    def __call__(self, session):
        while not self._stop.wait(0.001):
            self.look(session)

    @contextlib.contextmanager
    def over(self, *sessions):
        with ThreadPoolExecutor(len(sessions)) as threads:
            watching = [threads.submit(self, session) for session in sessions]
            try:
                yield
            finally:
                self._stop.set()
            for one in watching:
                one.result()

    def check(self):
        assert self.sets == [], "set in a session"
        assert self.seen == set(self.wanted.items())


@pytest.fixture
def watch(spark, monkeypatch):
    """The user's session with the user's values; whatever our code sets in any session of Python's is written down."""
    watch = Watch(spark)
    with contextlib.ExitStack() as given:
        for name, value in WATCHED.items():
            given.enter_context(with_setting(spark, name, value))
        patched = given.enter_context(monkeypatch.context())
        for change in ("set", "unset"):
            patched.setattr(RuntimeConfig, change, lambda _, *told: watch.sets.append(told))
        yield watch


@dataclass(frozen=True)
class Row:
    """One record of a log; `id` names it for people and sets."""

    topic: str
    partition: int
    offset: int
    metadata: StreamMetadata | None
    other_key: bytes | None
    id: str

    def cells(self, carrier="key"):
        key = self.metadata.pack() if self.metadata else self.other_key
        if carrier == "key":
            return (key, self.id, self.topic, self.partition, self.offset, None)
        older = (METADATA_HEADER, StreamMetadata(1, 2, 3).pack())
        headers = [("trace", b"t"), older, (METADATA_HEADER, key), ("trace", b"u")]
        return (b"business", self.id, self.topic, self.partition, self.offset, headers)


@dataclass
class Model:
    """The rule, one row at a time; remembers between calls as marks do."""

    window: int = 0
    only_pids: frozenset[int] | None = None
    highest: dict = field(default_factory=dict)
    seen: dict = field(default_factory=lambda: defaultdict(set))

    def kept(self, rows) -> set[str]:
        return {row.id for row in sorted(rows, key=lambda r: (r.topic, r.partition, r.offset)) if self._keeps(row)}

    def _keeps(self, row) -> bool:
        metadata = row.metadata
        if metadata is None or (self.only_pids is not None and metadata.pid not in self.only_pids):
            return True
        pair = row.topic, metadata.pid, metadata.partition
        highest = self.highest.get(pair, -1)
        inside = highest - self.window <= metadata.offset < highest and metadata.offset not in self.seen[pair]
        if metadata.offset > highest:
            self.highest[pair] = metadata.offset
        elif not inside:
            return False
        self.seen[pair].add(metadata.offset)
        return True


def random_topic(seed: int, rows: int = 80) -> list[Row]:
    """One topic's records: pairs pinned to partitions, rewinds, holes, small disorder, records without metadata."""
    rng = random.Random(seed)
    topic, partitions = f"topic-{seed}", rng.randint(1, 3)
    pairs = [(rng.choice([-7, 5, 2**62]), n) for n in rng.sample(range(9), rng.randint(1, 4))]
    home = {pair: rng.randrange(partitions) for pair in pairs}
    position = dict.fromkeys(pairs, 0)
    ends = [rng.randint(0, 5) for _ in range(partitions)]
    log = []
    for number in range(rows):
        pair = rng.choice(pairs)
        chance = rng.random()
        if chance < 0.07:
            position[pair] = max(0, position[pair] - rng.randint(1, 25))
        elif chance < 0.12:
            position[pair] += rng.randint(1, 6)
        partition, metadata, other = home[pair], None, None
        if chance > 0.92:
            partition, other = rng.randrange(partitions), rng.choice(NO_METADATA)
        else:
            late = rng.randint(1, 4) if chance > 0.85 else 0
            metadata = StreamMetadata(*pair, max(0, position[pair] - late))
            position[pair] += 1
        log.append(Row(topic, partition, ends[partition], metadata, other, f"{topic}:{number}"))
        ends[partition] += 1 if rng.random() < 0.9 else rng.randint(2, 4)
    return log


def rewound(rows: int, *, back: int) -> list[Row]:
    """Rows of one pair, of which the last `back` ones are the ones before them again: two runs."""
    sources = [n if n < rows - back else n - back for n in range(rows)]
    return [Row("rewound", 0, n, StreamMetadata(1, 0, s), None, f"rewound:{n}") for n, s in enumerate(sources)]


def out_of_order(topic: str = "disorder") -> list[Row]:
    """Rows that runs can't decide: 0 and 2 have the distance of the log, and row 1, of the same pair, is elsewhere."""
    return [
        Row(topic, 0, offset, StreamMetadata(1, pair, offset), None, f"{topic}:{offset}")
        for offset, pair in ((1, 0), (0, 0), (3, 1), (2, 0))
    ]


def in_batches(rows: list[Row], count: int, seed: int) -> list[list[Row]]:
    """The log cut into `count` batches like a stream's, each partition at different offsets."""
    rng = random.Random(seed)
    by_partition = defaultdict(list)
    for row in rows:
        by_partition[row.topic, row.partition].append(row)
    batches = [[] for _ in range(count)]
    for own in by_partition.values():
        cuts = sorted(rng.randint(0, len(own)) for _ in range(count - 1))
        for n, (low, high) in enumerate(zip([0, *cuts], [*cuts, len(own)], strict=True)):
            batches[n].extend(own[low:high])
    return batches


class Frames:
    """Makes frames of rows."""

    def __init__(self, spark) -> None:
        self.spark = spark

    def split(self, rows, parts=5, carrier="key", seed=0):
        """The log as a source reads it with minPartitions: contiguous ranges; a task has several of them
        interleaved.
        """
        rng = random.Random(seed)
        rows = sorted(rows, key=lambda r: (r.topic, r.partition, r.offset))
        cuts = sorted(rng.randint(0, len(rows)) for _ in range(parts - 1))
        tasks = [
            [row.cells(carrier) for row in _interleaved(rows[low:high], rng)]
            for low, high in zip([0, *cuts], [*cuts, len(rows)], strict=True)
        ]
        flat = self.spark.sparkContext.parallelize(tasks, parts).flatMap(lambda task: task)
        return self.spark.createDataFrame(flat, SCHEMA)

    def unordered(self, rows, carrier="key", seed=0):
        """One task, no order at all."""
        rows = list(rows)
        random.Random(seed).shuffle(rows)
        return self.in_one_piece(rows, carrier)

    def in_one_piece(self, rows, carrier="key"):
        """One task, in this order."""
        one = self.spark.sparkContext.parallelize([row.cells(carrier) for row in rows], 1)
        return self.spark.createDataFrame(one, SCHEMA)

    def counted(self, rows):
        """The same, and an accumulator of the rows that were read of it."""
        read = self.spark.sparkContext.accumulator(0)

        def reading(cells):
            read.add(1)
            return cells

        one = self.spark.sparkContext.parallelize([row.cells() for row in rows], 1).map(reading)
        return self.spark.createDataFrame(one, SCHEMA), read


def _interleaved(rows, rng):
    """A random merge that keeps the order inside each log partition."""
    queues = defaultdict(list)
    for row in rows:
        queues[row.topic, row.partition].append(row)
    order = [where for where, own in queues.items() for _ in own]
    rng.shuffle(order)
    for own in queues.values():
        own.reverse()
    return [queues[where].pop() for where in order]


def ids(frame) -> set[str]:
    """The ids of a frame's rows; duplicates are an error."""
    found = [row["value"] for row in frame.select("value").collect()]
    assert len(found) == len(set(found)), "a row came out twice"
    return set(found)


@pytest.fixture
def frames(spark):
    return Frames(spark)


@pytest.fixture
def logs():
    """Makers and judges: .random_topic, .rewound, .out_of_order, .in_batches, .Model, .ids, .Row."""
    import types

    return types.SimpleNamespace(
        random_topic=random_topic,
        rewound=rewound,
        out_of_order=out_of_order,
        in_batches=in_batches,
        Model=Model,
        ids=ids,
        Row=Row,
    )


@pytest.fixture
def generated_code(spark):
    """Plans as users have them, joined and compiled: for tests of what looks into a plan, or of each form's rows."""
    usual = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
    before = {name: spark.conf.get(name) for name in usual}
    for name, value in usual.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def inside_query(spark):
    """Call it with a query id: what follows looks to a handler like that query's foreachBatch."""
    context = spark.sparkContext

    def begin(query_id):
        context.setLocalProperty("sql.streaming.queryId", query_id)

    yield begin
    context.setLocalProperty("sql.streaming.queryId", None)
