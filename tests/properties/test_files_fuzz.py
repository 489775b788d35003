"""Files that somebody changed: whoever reads one says by a named error, in one line, what is wrong, and is not stopped.

spoiled     a byte, a stretch or the length is another; the file is empty, random, or 60,000 brackets
forged      a value of its JSON is another and the checksum fits again: what no checksum finds
"""

import json
import shutil
import zlib
from contextlib import suppress
from uuid import UUID

import pytest

from filtering import FilteringError, HighwaterMarks
from pushrep import Outbox, OutboxConfig
from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import crc_of_fields, journal_line
from pushrep.errors import PushrepError
from pushrep.kafka.progress import EpochPartitions, PartitionProgress, ShippingProgress, write_progress
from pushrep.log import LogConfig
from pushrep.outbox.configured import outbox_settings
from pushrep.replay import ReplayClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.startpoints import Startpoint, StartpointStore
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey, RowCounts
from spark_jobs.errors import SparkJobError
from spark_jobs.file_marks import FileMarks
from tests.support.forged import forged_value

LOGS = LogConfig(preallocate_bytes=0, segment_bytes=300, index_interval_bytes=64)
CONFIG = OutboxConfig(log_config=LOGS, push=PushSettings(backoff_min_ms=1, backoff_max_ms=10))
NAMED = (PushrepError, FilteringError, SparkJobError)
DEEP = (
    b"[" * 60_000,
    b'{"a":' * 60_000,
    b"[" * 900 + b"]" * 900,
    b'{"version": 1, "a": ' + b"[" * 900 + b"]" * 900 + b"}",
)
TOML = (
    b'[outbox]\ndirectory = "o"\ntopic = "orders"\npartitions = 1\nproducer = "billing"\n[log]\nsegment_bytes = 1000\n'
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two outboxes, startpoints and a consumer of one, a node with the other's copies, marks, a service's settings."""
    root = tmp_path_factory.mktemp("made")
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=LOGS)
    with (
        ReplicaNode(root / "node", settings) as node,
        Outbox.open(root / "led", "orders", 2, "billing", replicas=[str(node.address)], config=CONFIG) as led,
        Outbox.open(root / "outbox", "orders", 2, "billing", config=CONFIG) as outbox,
    ):
        for number in range(12):
            led.append(number % 2, b"value %d" % number).result(30)
            outbox.append(number % 2, b"value %d" % number, headers=[("a", b"b")]).result(30)
        with ReplayClient(str(node.address)) as client:
            assert len(client.recordings()) == 2
    store = StartpointStore.open(root / "outbox" / "startpoints")
    store.write("billing", "orders", 0, Startpoint.specific(3), "again", author="ann")
    with ReplayClient(root / "outbox").subscribe("orders", consumer="billing") as reads:
        reads.poll()
        reads.commit()
    store.write("billing", "orders", 1, Startpoint.earliest(), "and again", author="ann")
    shipped = ShippingProgress(
        topic_id=UUID(int=7), epochs=(EpochPartitions(0, 3),), partitions={0: PartitionProgress(2, 2, 4711)}
    )
    write_progress(REAL_FILESYSTEM, root / "outbox", {"orders": shipped})
    marks = HighwaterMarks.from_columns([7, 8], [0, 1], [1041, 3], window=4, bitmaps=[[0b0111], [0b0101]])
    one = BatchMarks(
        "q", 0, (LogRange("orders", 0, 0, 10),), {MarksKey("orders"): marks}, counts=RowCounts(9, 9, 0, 0, 0, 0)
    )
    FileMarks(root / "marks").write(one, keep=2)
    (root / "service.toml").write_bytes(TOML)
    (root / "rules.txt").write_text("billing=orders*:read,list\n# a comment\nann\n", encoding="utf-8")
    return root


def forged(random, data):
    """With a checksum that fits. What is no JSON is spoiled instead."""
    if data.startswith(b"PBMK"):
        return forged_marks(random, data)
    lines = data.split(b"\n")
    try:
        if data.startswith(b"{"):
            fields = json.loads(data)
            del fields["crc32c"]
            fields = forged_value(random, fields)
            if isinstance(fields, dict):
                return json.dumps(fields | {"crc32c": crc_of_fields(fields)}).encode()
            return json.dumps(fields).encode()
        at = random.randrange(len(lines) - 1)
        lines[at] = journal_line(forged_value(random, json.loads(lines[at][9:])))[:-1]
    except (ValueError, KeyError, UnicodeEncodeError):
        return spoiled(random, data)
    return b"\n".join(lines)


def forged_marks(random, data):
    data = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(len(data) - 4)] = random.randrange(256)
    return bytes(data[:-4]) + zlib.crc32(data[:-4]).to_bytes(4)


def spoiled(random, data):
    if random.random() < 0.1:
        return random.choice((b"", random.randbytes(200), bytes(300), *DEEP))
    data = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(data) + 1)
        data[at : at + random.randrange(4)] = random.randbytes(random.randrange(4))
    return bytes(data[: random.randrange(len(data) + 1)] if random.random() < 0.1 else data)


def commands(place):
    """What a user would ask of the file at `place` below the root, and which program opens it."""
    top = place.parts[0]
    if top == "service.toml":
        return [lambda root: outbox_settings(root / top, environ={})]
    if top == "rules.txt":
        return [lambda root: NodeSettings(allow_file=root / top)]
    if top == "marks":
        return [lambda root: FileMarks(root / top).read("q", 0)]
    if "startpoints" in place.parts:
        return [
            ["startpoint", "history", "outbox"],
            ["startpoint", "list", "outbox", "--all"],
            ["startpoint", "show", "outbox", "1"],
            [
                "startpoint",
                "set",
                "outbox",
                "orders",
                "--to=earliest",
                "--consumer=billing",
                "--reason=go",
                "--dry-run",
            ],
            lambda root: StartpointStore.open(root / "outbox" / "startpoints").write(
                "billing", "orders", 0, Startpoint.latest(), "go", author="ann"
            ),
            lambda root: ReplayClient(root / "outbox").subscribe("orders", consumer="billing").close(),
        ]
    log = next((part for part in place.parts if part.startswith("orders-")), None)
    above = str(place.parents[len(place.parts) - 1 - place.parts.index(log)]) if log else top
    asked = [["status", top], ["log", "ls", above]]
    if log is not None:
        asked += [["log", words, above] for words in ("describe", "verify")]
        asked += [["log", "dump", str(place), "--records"], ["replay", above, log]]
    return [*asked, opened_outbox if top == "outbox" else opened_node]


def says(root, asked):
    """Run one command of the shell in the directory, and hold it to its answer: an exit code, and printable lines."""
    at = {"node", "outbox", "led"}
    return cli_main.run([str(root / word) if word.partition("/")[0] in at else word for word in asked])


def hold(root, asked, capsys):
    """Whoever reads the file says what is wrong by a named error."""
    if callable(asked):
        with suppress(*NAMED):
            asked(root)
    else:
        assert says(root, asked) in {0, 1, 3}, f"{asked}: {capsys.readouterr().err}"
    said = capsys.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable()


@pytest.mark.parametrize("how", [spoiled, forged])
def test_n8_a_changed_file_is_named_by_whoever_reads_it(made, tmp_path, torture, capsys, how):
    random, root = torture.random(f"files {how.__name__}"), tmp_path / "work"
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file() and path.name != ".lock")
    if how is forged:
        files = [place for place in files if (made / place).read_bytes()[:1] in {b"{", b"P"} or "journal" in place.name]
    shutil.copytree(made, root)
    for number in range(torture.count(60, 10_000)):
        place = random.choice(files)
        asked, before = random.choice(commands(place)), (made / place).read_bytes()
        data = how(random, before)
        (root / place).write_bytes(data)
        try:
            hold(root, asked, capsys)
        except BaseException as error:
            error.add_note(f"{place}, change {number}, {asked}: {data[:300]!r}")
            raise
        (root / place).write_bytes(before)
        if callable(asked) or asked[:2] == ["startpoint", "list"]:  # these write
            shutil.rmtree(root / place.parts[0]) if len(place.parts) > 1 else None
            shutil.copytree(made / place.parts[0], root / place.parts[0]) if len(place.parts) > 1 else None


def opened_outbox(root):
    Outbox.open(root / "outbox", "orders", 2, "billing", config=CONFIG).close()


def opened_node(root):
    with ReplicaNode(root / "node", NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))):
        pass
