"""A real broker and our log read each other's files: one story of one broker, judged from several sides.

broker writes topics ─▶ kill -9 ─▶ copy "killed" ─▶ its topic "ours" is replaced by our files ─▶ it starts, recovers,
serves everything to a plain consumer ─▶ clean stop ─▶ copy "stopped"
"""

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tenacity import retry, stop_after_delay, wait_fixed

from pushrep.cli.main import cli
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import CompactedLog, Durability, LogConfig, SegmentLog, list_logs
from pushrep.log.directory_files import compacted_logs, list_segments, segment_path
from pushrep.log.directory_id import DIRECTORY_ID_NAME, settled_id, write_directory_id
from pushrep.records import Codec, TimestampType
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.dump_tool import dump_segments
from tests.kafka.plain_client import Seen, consume, create_topic, plain_producer, send

pytestmark = [pytest.mark.java, pytest.mark.slow]

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
DENSE = [*CODECS, "broker-time", "transactions"]
COMPACTED_TOPICS = ["compacted", "compacted-transactions"]
THEIRS = [*DENSE, *COMPACTED_TOPICS]
SMALL = {"internal_segment_bytes": 40_000, "index_interval_bytes": 1024}
COMPACTED = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.01, "internal_segment_bytes": 20_000}
WAIT_S = 120
KILLED = len(Codec)
"""The partition of "ours" that our own kill -9 left, with zeros ahead; nobody recovered it before the broker."""

WRITER = """
import sys
from pushrep.cli.main import cli
from pushrep.log import Durability, LogConfig, SegmentLog
log = SegmentLog.open(sys.argv[1], LogConfig(segment_bytes=60_000, batch_bytes=1500, preallocate_bytes=40_000))
for _ in range(65):
    values = [b"value %d" % n * (n % 9) for n in range(70)]
    print(log.append(values, timestamps_ms=1_700_000_000_000, durability=Durability.BUFFERED).last_offset, flush=True)
sys.stdin.read()
"""


class Story:
    """The batches sent to the broker, the records it served, and its directories."""

    def __init__(self, cluster: KafkaCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.theirs: dict[str, list[Seen]] = {}
        self.ours: dict[int, list[Seen]] = {}
        self.served: dict[int, list[Seen]] = {}
        self.theirs_again: dict[str, list[Seen]] = {}

    @property
    def servers(self) -> str:
        return self.cluster.bootstrap_servers

    def copy_of_broker(self, name: str) -> Path:
        return shutil.copytree(self.cluster.log_directory(), self.directory / name)


@pytest.fixture(scope="module")
def story(tmp_path_factory, tool_or_skip):
    tool_or_skip(missing())
    directory = tmp_path_factory.mktemp("broker")
    # The records are old: a broker that runs for half a minute would delete them before they are read.
    settings = {"log.cleaner.backoff.ms": "100", "log.retention.ms": "-1"}
    with KafkaCluster(directory / "cluster", settings=settings) as cluster:
        told = Story(cluster, directory)
        broker_writes(told)
        told.theirs = {topic: consume(told.servers, topic) for topic in THEIRS}
        cluster.kill()
        told.copy_of_broker("killed")
        we_write(told)
        replace_topic(told)
        cluster.start()
        cluster.wait_ready()
        told.served = {partition: consume(told.servers, "ours", partition) for partition in told.ours}
        told.theirs_again = {topic: consume(told.servers, topic) for topic in THEIRS}
        cluster.shut_down()
        told.copy_of_broker("stopped")
    return told


def broker_writes(told):
    create_topic(told.servers, "ours", KILLED + 1)
    noise = random.Random(1)  # so that compressed segments fill up, too
    for codec in CODECS:
        create_topic(told.servers, codec, **SMALL)
        # Batches without a producer's id, the only kind that never is in doubt: each waits for the one before.
        producer = plain_producer(told.servers, compression_type=codec, enable_idempotence=False, max_in_flight=1)
        for n in range(0, 1500, 50):
            headers = [("name", b"%d" % n), ("empty", b""), ("null", None)] if n % 100 else None
            keys = [b"%d" % i if i % 7 else None for i in range(n, n + 50)]
            values = [noise.randbytes(20) + b"x" * (i % 50) if i % 11 else None for i in range(n, n + 50)]
            send(
                producer,
                codec,
                zip(keys, values, strict=True),
                headers=headers,
                timestamp=1_700_000_000_000 + n * 10 - n % 3 * 70,
            )
    create_topic(told.servers, "broker-time", message_timestamp_type="LogAppendTime")
    for n in range(5):
        send(plain_producer(told.servers), "broker-time", [(b"k", b"%d" % (n * 10 + i)) for i in range(10)])
    create_topic(told.servers, "transactions", **SMALL)
    create_topic(told.servers, "compacted-transactions", **COMPACTED)
    in_transactions(told, "transactions", lambda round_, n: b"%d %d" % (round_, n))
    in_transactions(told, "compacted-transactions", lambda round_, n: b"%d" % (n if round_ % 3 else n * 100 + round_))
    create_topic(told.servers, "compacted", **COMPACTED, delete_retention_ms=3_600_000)
    send(plain_producer(told.servers), "compacted", [compacted_record(n) for n in range(6000)])
    wait_until_compacted(told, "compacted")
    wait_until_compacted(told, "compacted-transactions")


def compacted_record(n):
    """Few keys again and again, some once, some deleted at last."""
    key = n % 40 if n % 300 else n
    return b"%d" % key, None if n > 3000 and key < 10 else b"value %d" % n * 5


def in_transactions(told, topic, key):
    """Every third one is aborted; some have nothing but their end."""
    producer = plain_producer(told.servers, transactional_id=f"of-{topic}")
    producer.init_transactions(WAIT_S)
    for round_ in range(12):
        producer.begin_transaction()
        send(producer, topic, [(key(round_, n), b"%d of %d" % (n, round_) * 8) for n in range(60)])
        if round_ % 3 == 2:
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)


@retry(stop=stop_after_delay(60), wait=wait_fixed(0.1), reraise=True)
def wait_until_compacted(told, topic):
    cleaned = compacted_logs(told.cluster.log_directory()).get(f"{topic}-0", 0)
    newest = list_segments(REAL_FILESYSTEM, told.cluster.log_directory() / f"{topic}-0")[-1]
    assert cleaned == newest > 0, f"the cleaner went over {topic} up to {cleaned}, its newest segment is {newest}"


def we_write(told):
    """Partition n of "ours": codec n, several segments, keys, values and headers with nulls, times that go back."""
    told.ours = {codec.value: [] for codec in Codec}
    for codec in Codec:
        config = LogConfig(segment_bytes=30_000, batch_bytes=1500, codec=codec, preallocate_bytes=10_000)
        with SegmentLog.open(told.directory / "mine" / f"ours-{codec.value}", config) as log:
            for n in range(0, 2000, 40):
                keys = [b"key %d" % i if i % 5 else None for i in range(n, n + 40)]
                values = [b"value %d " % i * (i % 13) if i % 17 else None for i in range(n, n + 40)]
                headers = [[("a", b"%d" % i), ("", None), ("\u00e9", b"")] if i % 3 else [] for i in range(n, n + 40)]
                times = [1_700_000_000_000 + i * 10 - i % 7 * 25 for i in range(n, n + 40)]
                log.append(values, keys=keys, headers=headers, timestamps_ms=times, durability=Durability.BUFFERED)
                rows = zip(range(n, n + 40), times, keys, values, headers, strict=True)
                told.ours[codec.value] += [Seen(o, t, True, k, v, tuple(h)) for o, t, k, v, h in rows]
    path = told.directory / "mine" / f"ours-{KILLED}"
    # It stands still in the middle of a segment, with room allocated ahead: no chance decides what the broker finds.
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    acknowledged = [int(writer.stdout.readline()) for _ in range(65)][-1]
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    writer.stdin.close()
    assert segment_path(path, list_segments(REAL_FILESYSTEM, path)[-1]).read_bytes().endswith(bytes(1000))
    values = [b"value %d" % n * (n % 9) for n in range(70)]
    told.ours[KILLED] = [Seen(n, 1_700_000_000_000, True, None, values[n % 70], ()) for n in range(acknowledged + 1)]


def replace_topic(told):
    """Replace the broker's files by ours, as an operator would: the topic id stays, and the broker's notes are
    removed.
    """
    data = told.cluster.log_directory()
    for partition in told.ours:
        theirs, mine = data / f"ours-{partition}", told.directory / "mine" / f"ours-{partition}"
        topic_id = (theirs / "partition.metadata").read_bytes()
        shutil.rmtree(theirs)
        shutil.copytree(mine, theirs)
        (theirs / "partition.metadata").write_bytes(topic_id)
        assert sorted(theirs.glob("*.seal")), "segments that rolled are sealed"
    write_directory_id(data, REAL_FILESYSTEM, settled_id(None))
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        kept = [line for line in (data / name).read_text().splitlines()[2:] if not line.startswith("ours ")]
        (data / name).write_text("".join(f"{line}\n" for line in ["0", len(kept), *kept]))
    assert not (data / ".kafka_cleanshutdown").exists(), "it was killed: it will recover"


@pytest.mark.parametrize("partition", [*(pytest.param(codec.value, id=codec.name) for codec in Codec), KILLED])
def test_a_broker_serves_our_records_to_a_plain_consumer(story, partition):
    expected, served = story.ours[partition], story.served[partition]
    assert len(list_segments(REAL_FILESYSTEM, story.directory / "mine" / f"ours-{partition}")) > 1
    assert served[: len(expected)] == expected
    # Of the killed writer, records that it had no time left to report may be there, whole and in order.
    more = served[len(expected) :]
    assert partition == KILLED or not more
    assert [seen.offset for seen in more] == list(range(len(expected), len(served)))
    assert [seen.value for seen in more] == [b"value %d" % (seen.offset % 70) * (seen.offset % 70 % 9) for seen in more]


def test_the_broker_left_our_batches_as_they_were(story):
    for partition in story.ours:
        mine, theirs = story.directory / "mine" / f"ours-{partition}", story.directory / "stopped" / f"ours-{partition}"
        for base in list_segments(REAL_FILESYSTEM, mine):
            kept = segment_path(theirs, base).read_bytes()
            written = segment_path(mine, base).read_bytes()
            assert written[: len(kept)] == kept, f"partition {partition}, segment {base}"
            assert not written[len(kept) :].strip(b"\0"), f"partition {partition}, segment {base}: a batch was cut"


def test_a_broker_passes_our_own_files_over(story):
    """The broker starts, recovers, serves and stops with these files present, and does not remove them."""
    stopped = story.directory / "stopped"
    assert (stopped / DIRECTORY_ID_NAME).is_file()
    for partition in story.ours:
        mine = {
            path.name: path.read_bytes() for path in (story.directory / "mine" / f"ours-{partition}").glob("*.seal")
        }
        assert mine
        assert {path.name: path.read_bytes() for path in (stopped / f"ours-{partition}").glob("*.seal")} == mine


def test_dump_log_segments_accepts_what_the_broker_made_of_our_files(story):
    dumps = dump_segments(*(story.directory / "stopped" / f"ours-{partition}" for partition in story.ours))
    for partition, dump in zip(story.ours, dumps, strict=True):
        assert not dump.objections, f"partition {partition}"
        assert not dump.has_holes, f"partition {partition}"
        assert sum(batch["count"] for batch in dump.batches) == len(story.served[partition])


@pytest.fixture(scope="module", params=["killed", "stopped"])
def left(story, request, tmp_path_factory):
    """(copy of what the broker left, what its consumer had read before)."""
    data = shutil.copytree(story.directory / request.param, tmp_path_factory.mktemp("left") / "data")
    for seal in data.glob("ours-*/*.seal"):  # of the log whose files the topic took over: another log id is refused
        seal.unlink()
    return data, story.theirs if request.param == "killed" else story.theirs_again


@pytest.fixture(scope="module")
def opened(left):
    """{name of a log: (its recovery, records, batch headers)}, every log of the copy that no cleaner went over, opened
    by us and closed again.
    """
    data, _ = left
    found, compacted = {}, compacted_logs(data)
    assert {"compacted-0", "compacted-transactions-0"} <= compacted.keys()
    for topic, partition in list_logs(data):
        if f"{topic}-{partition}" in compacted:
            with pytest.raises(CompactedLog):
                SegmentLog.open(data / f"{topic}-{partition}")
            continue
        with SegmentLog.open(data / f"{topic}-{partition}") as log:
            headers = [batch.header for batch in log.batches(log.log_start_offset)]
            found[f"{topic}-{partition}"] = (log.recovery, as_seen(log.records(log.log_start_offset)), headers)
    return found


@pytest.fixture(scope="module")
def dumps(story, left, opened):
    """{topic: what Kafka's own tool says of its log}; one run of it for all, behind our recovery: what a killed broker
    leaves are indexes that are not whole.
    """
    data, theirs = left
    topics = DENSE if theirs is story.theirs else THEIRS
    return dict(zip(topics, dump_segments(*(data / f"{topic}-0" for topic in topics)), strict=True))


def as_seen(records):
    return [
        Seen(r.offset, r.timestamp_ms, r.timestamp_type is TimestampType.CREATE_TIME, r.key, r.value, r.headers)
        for r in records
    ]


def test_our_log_opens_every_directory_of_a_broker(story, left, opened):
    data, theirs = left
    assert {f"{topic}-0" for topic in [*DENSE, "ours", "__cluster_metadata"]} <= set(opened)
    for name, (recovery, records, _) in opened.items():
        assert (recovery.damaged_from, recovery.cut) == (None, None), f"{name}: {recovery}"
        topic = name.removesuffix("-0")
        assert topic not in theirs or records == theirs[topic], topic
        with SegmentLog.open_reader(data / name) as reader:
            assert as_seen(reader.records(reader.log_start_offset)) == records, name


def test_a_brokers_own_files_are_left_alone(story, left, opened):
    data, _ = left
    original = story.directory / ("killed" if left[1] is story.theirs else "stopped")
    foreign = [path for path in original.glob("*/*") if path.suffix in {".snapshot", ".txnindex", ".deleted"}]
    assert {".snapshot", ".txnindex"} <= {path.suffix for path in foreign}
    for path in [*foreign, *original.glob("*.properties"), *original.glob(".kafka_cleanshutdown")]:
        assert (data / path.relative_to(original)).read_bytes() == path.read_bytes()


def test_a_reader_alone_reads_what_the_checkpoints_vouch_for(story):
    for topic in DENSE:
        with SegmentLog.open_reader(story.directory / "stopped" / f"{topic}-0") as reader:
            assert as_seen(reader.records(reader.log_start_offset)) == story.theirs_again[topic], topic
    for topic in COMPACTED_TOPICS:
        with pytest.raises(CompactedLog):
            SegmentLog.open_reader(story.directory / "stopped" / f"{topic}-0")


def test_every_batch_of_a_broker_is_what_kafkas_own_tool_says(opened, dumps):
    for topic, dump in dumps.items():
        assert not dump.objections, topic
        assert dump.has_holes == (topic in COMPACTED_TOPICS), topic
        if topic in COMPACTED_TOPICS:
            continue
        ours = [described(header) for header in opened[f"{topic}-0"][2]]
        assert ours == [{name: batch[name] for name in ours[0]} for batch in dump.batches], topic


def test_the_story_has_what_it_was_meant_to_have(story, left, opened):
    """Control batches, deleted keys, several segments, the broker's time."""
    data, theirs = left
    bases = {topic: list_segments(REAL_FILESYSTEM, data / f"{topic}-0") for topic in THEIRS}
    assert [topic for topic in THEIRS if len(bases[topic]) < 2] == ["broker-time"]
    assert not any(seen.is_create_time for seen in theirs["broker-time"])
    assert {header.codec for topic in CODECS for header in opened[f"{topic}-0"][2]} == set(Codec)
    assert len([header for header in opened["transactions-0"][2] if header.is_control]) == 12
    assert len(theirs["transactions"]) == 720, "read_uncommitted: those of aborted transactions are there"
    compacted = theirs["compacted"]
    assert len(compacted) < 3000 < compacted[-1].offset
    assert any(seen.value is None for seen in compacted), "deleted keys"


def described(header):
    return {
        "baseOffset": header.base_offset,
        "lastOffset": header.last_offset,
        "count": header.record_count,
        "baseSequence": header.base_sequence,
        "producerId": header.producer_id,
        "producerEpoch": header.producer_epoch,
        "partitionLeaderEpoch": header.leader_epoch,
        "isTransactional": header.is_transactional,
        "isControl": header.is_control,
        "size": header.size_bytes,
        "magic": header.magic,
        "compresscodec": header.codec.name.lower(),
        "crc": header.crc,
        "time": header.max_timestamp_ms,
    }


def test_our_own_tools_agree(left, dumps):
    """`pushrep log dump --json` has the same names and values as Kafka's tool; `verify` finds no damage."""
    data, _ = left
    for topic, kafka in dumps.items():
        named = [str(data), f"{topic}-0"]
        is_compacted = topic in COMPACTED_TOPICS
        said = CliRunner().invoke(cli, ["log", "dump", *named, "--json"])
        assert said.exit_code == is_compacted, f"{topic}: {said.output[-500:]}"
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        ours = [as_kafka_says(line) for line in lines if "baseOffset" in line]
        assert ours == [{name: batch[name] for name in ours[0]} for batch in kafka.batches], topic
        verified = CliRunner().invoke(cli, ["log", "verify", *named, "--json"])
        assert verified.exit_code == is_compacted, f"{topic}: {verified.output[-500:]}"
        kinds = {finding["kind"] for finding in json.loads(verified.stdout)["findings"]}
        assert kinds == ({"hole"} if is_compacted else set()), topic


def as_kafka_says(batch):
    horizon, kind = batch["deleteHorizonMs"], batch["timestampType"]
    return {
        **{name: said for name, said in batch.items() if name not in {"file", "timestampType", "maxTimestamp"}},
        "deleteHorizonMs": "OptionalLong.empty" if horizon is None else f"OptionalLong[{horizon}]",
        {"CREATE_TIME": "CreateTime", "LOG_APPEND_TIME": "LogAppendTime"}[kind]: batch["maxTimestamp"],
    }
