"""serializer=, key_serializer= and partition_by= of an outbox: what becomes of a caller's values, and when."""

import asyncio
import json
import threading
import zlib
from dataclasses import dataclass
from inspect import signature

import numpy as np
import pytest

from filtering import StreamMetadata
from filtering.murmur import default_partition
from pushrep import AsyncOutbox, LogConfig, Outbox, OutboxConfig
from pushrep.errors import BadArgument
from pushrep.outbox import RecordRefused
from pushrep.outbox.columns import RecordRules
from pushrep.outbox.configured import outbox_settings
from pushrep.values import Serializer, to_json


@dataclass
class Order:
    id: int
    customer: str


def open_outbox(path, **settings):
    wanted = {"topic": "orders", "partitions": 4, "producer": "billing", "carrier": "header", **settings}
    return Outbox.open(path, **wanted)


def values(outbox, partition=0):
    return [record.value for record in outbox.log(partition).records(0)]


def test_every_way_to_append_serializes(tmp_path):
    with open_outbox(tmp_path, serializer=to_json, key_serializer=str.encode) as outbox:
        outbox.append(0, Order(1, "a"), "k")
        outbox.append(0, None, "k")
        outbox.append_many(0, [Order(2, "b"), None], keys=["k2", None])
        outbox.flush()
        assert values(outbox) == [b'{"id":1,"customer":"a"}', None, b'{"id":2,"customer":"b"}', None]
        assert [record.key for record in outbox.log(0).records(0)] == [b"k", b"k", b"k2", None]


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_bytes_go_through_a_serializer_too(tmp_path, carrier):
    with open_outbox(tmp_path, carrier=carrier, serializer=zlib.compress) as outbox:
        outbox.append(0, b"first").result(60)
        outbox.append(0, b"a batch is open")
        outbox.append(0, b"with a time", timestamp_ms=1)
        outbox.append_many(0, [b"many"])
        outbox.flush()
        assert [zlib.decompress(one) for one in values(outbox)] == [
            b"first",
            b"a batch is open",
            b"with a time",
            b"many",
        ]


def test_what_is_bytes_already_is_not_serialized_again(tmp_path):
    """Rows of a table, parked records."""
    with open_outbox(tmp_path, serializer=zlib.compress) as outbox:
        outbox.append_serialized(0, b"parked", b"k", [], 5)
        outbox.append_serialized_many(0, [b"rows"])
        outbox.flush()
        assert values(outbox) == [b"parked", b"rows"]


def test_a_worker_slot_takes_the_same(tmp_path):
    settings = {"topic": "orders", "partitions": 4, "producer": "billing", "carrier": "header"}
    with Outbox.open_slot(
        tmp_path, **settings, serializer=to_json, key_serializer=str.encode, partition_by="key"
    ) as outbox:
        outbox.append(value={"id": 1}, key="x").result(60)
        assert values(outbox, default_partition(b"x", 4)) == [b'{"id":1}']


def test_a_key_goes_where_kafkas_own_partitioner_puts_it(tmp_path):
    """The hashes are those of org.apache.kafka.common.utils.UtilsTest.testMurmur2."""
    placed = {
        b"21": 2,
        b"foobar": 0,
        b"a-little-bit-long-string": 0,
        b"customer-7": default_partition(b"customer-7", 4),
    }
    with open_outbox(tmp_path, partition_by="key") as outbox:
        for key in placed:
            outbox.append(value=key, key=key)
        outbox.flush()
        assert {value: n for n in range(4) for value in values(outbox, n)} == {
            key: default_partition(key, 4) for key in placed
        }


def test_records_without_a_key_take_turns(tmp_path):
    with open_outbox(tmp_path, partition_by="key") as outbox:
        for n in range(8):
            outbox.append(value=b"%d" % n)
        outbox.append(3, b"its own")
        outbox.flush()
        assert [len(values(outbox, n)) for n in range(4)] == [2, 2, 2, 3]


def test_a_function_of_the_value_places_a_record(tmp_path):
    with open_outbox(tmp_path, carrier="key", serializer=to_json, partition_by=lambda order: order.id % 4) as outbox:
        outbox.append(value=Order(6, "a"))
        with pytest.raises(BadArgument, match="partition"):
            outbox.append(value=Order(0.5, "a"))
        outbox.flush()
        assert [json.loads(one)["id"] for one in values(outbox, 2)] == [6]


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"carrier": "key", "partition_by": "key"}, "partition_by"),
        ({"carrier": "key", "key_serializer": str.encode}, "key_serializer"),
        ({"partition_by": "value"}, "partition_by"),
        ({"partition_by": 7}, "partition_by"),
        ({"serializer": "json"}, "serializer"),
        ({"serializer": AsyncOutbox.flush}, "serializer"),
    ],
)
def test_a_setting_that_can_not_be_is_refused_by_name_before_anything_is_made(tmp_path, settings, argument):
    with pytest.raises(BadArgument) as refused:
        open_outbox(tmp_path / "outbox", **settings)
    assert refused.value.argument == argument
    assert not (tmp_path / "outbox").exists()


@pytest.mark.parametrize(
    "way", [Outbox.open, Outbox.open_slot, Outbox.stand_by, AsyncOutbox.open_slot, AsyncOutbox.stand_by]
)
def test_every_way_to_open_takes_the_same_settings(way):
    mine, theirs = (signature(one).parameters for one in (Outbox.open, way))
    for name in ("serializer", "key_serializer", "partition_by"):
        assert mine[name] == theirs[name]


def test_a_standby_refuses_before_it_waits(tmp_path):
    with pytest.raises(BadArgument, match="partition_by: this outbox carries the metadata in the key"):
        Outbox.stand_by(tmp_path, "orders", 4, "billing", carrier="key", partition_by="key")


def test_a_file_places_by_key(tmp_path):
    (tmp_path / "s.toml").write_text('[outbox]\ncarrier = "header"\npartition_by = "key"\n')
    settings = outbox_settings(tmp_path / "s.toml", {}, directory=tmp_path / "o", topic="o", partitions=4, producer="p")
    with Outbox.open(**settings) as outbox:
        outbox.append(value=b"x", key=b"foobar").result(60)
        assert values(outbox, default_partition(b"foobar", 4)) == [b"x"]


def test_what_is_left_out_is_refused_by_name(tmp_path):
    with open_outbox(tmp_path) as outbox:
        with pytest.raises(RecordRefused, match="partition: has to be given, or partition_by="):
            outbox.append(value=b"x")
        with pytest.raises(RecordRefused, match="value: has to be given"):
            outbox.append(0)
        with pytest.raises(
            RecordRefused, match="value: give bytes or None, not dict, or open the outbox with serializer="
        ):
            outbox.append(0, {"id": 1})
        with pytest.raises(RecordRefused, match=r"keys\[0\]: give .*, or open the outbox with key_serializer="):
            outbox.append_many(0, [b"x"], keys=["k"])
        with pytest.raises(RecordRefused, match=r"headers: give bytes or None, not str$"):
            outbox.append(0, b"x", headers=[("trace", "1")])


def test_a_serializer_that_gives_no_bytes_is_refused_by_name(tmp_path):
    with open_outbox(tmp_path, serializer=json.dumps) as outbox:
        with pytest.raises(BadArgument, match=r"serializer: it gave str for a dict, not bytes"):
            outbox.append(0, {"id": 1})
        outbox.flush()
        assert values(outbox) == []


@pytest.mark.parametrize("given", [b"abc", "abc", {"id": 1}, 5, None])
def test_one_value_is_no_list_of_values_though_a_serializer_would_take_its_parts(tmp_path, given):
    with open_outbox(tmp_path, serializer=to_json, key_serializer=str.encode) as outbox:
        for argument, append in (
            ("values", lambda: outbox.append_many(0, given)),
            ("keys", lambda: outbox.append_many(0, [1, 2, 3], keys=given if given is not None else 5)),
        ):
            with pytest.raises(RecordRefused) as refused:
                append()
            assert refused.value.argument == argument
        outbox.flush()
        assert values(outbox) == []
        assert outbox.facts.refused == {"RecordRefused": 2}


def test_in_an_event_loop_no_value_of_a_generator_is_lost(tmp_path):
    async def main():
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=1, producer="billing", carrier="header",
            serializer=to_json, key_serializer=str.encode,
        ) as outbox:  # fmt: skip
            for _ in range(2):  # the types are new, then known
                await (await outbox.append_many(0, iter([1, 2]), keys=iter(["a", "b"])))
            return [(one.key, one.value) for one in outbox.outbox.log(0).records(0)]

    assert asyncio.run(main()) == [(b"a", b"1"), (b"b", b"2")] * 2


def test_a_serializers_own_error_reaches_the_caller_and_the_next_record_goes_on(tmp_path):
    with open_outbox(tmp_path, serializer=lambda number: b"%d" % (1 // number), partition_by="key") as outbox:
        with pytest.raises(ZeroDivisionError) as own:
            outbox.append(value=0)
        assert own.value.__context__ is None
        outbox.append(0, 1).result(60)


def test_in_an_event_loop_the_first_value_of_a_type_is_serialized_in_a_thread(tmp_path):
    at: list[tuple[str, int]] = []

    def serializer(value):
        at.append((type(value).__name__, threading.get_ident()))
        return to_json(value)

    async def main():
        mine = threading.get_ident()
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=4, producer="billing", carrier="header",
            serializer=serializer, key_serializer=str.encode, partition_by="key",
        ) as outbox:  # fmt: skip
            receipts = [await outbox.append(value={"id": n}, key="k") for n in range(3)]
            receipts += [await outbox.append(value=Order(n, "a"), key="k") for n in range(2)]
            receipts.append(await outbox.append_many(default_partition(b"k", 4), [[1], [2]], keys=["k", "k"]))
            assert [await one for one in receipts] == [0, 1, 2, 3, 4, 5]
            assert [(name, thread == mine) for name, thread in at] == [
                ("dict", False), ("dict", True), ("dict", True), ("Order", False), ("Order", True),
                ("list", False), ("list", False),
            ]  # fmt: skip

    asyncio.run(main())


def test_in_an_event_loop_too_what_is_refused_before_it_is_serialized_is_counted(tmp_path):
    async def main():
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=1, producer="billing", serializer=to_json
        ) as outbox:
            for _ in range(2):
                with pytest.raises(RecordRefused):
                    await outbox.append(9, {})
            assert outbox.outbox.facts.refused == {"RecordRefused": 2}

    asyncio.run(main())


def test_in_an_event_loop_a_value_is_serialized_once_though_memory_has_to_be_waited_for(tmp_path):
    count = 0

    def serializer(value):
        nonlocal count
        count += 1
        return value

    async def main():
        config = OutboxConfig(buffer_bytes=4096, log_config=LogConfig(batch_bytes=4096))
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=1, producer="billing", serializer=serializer, config=config
        ) as outbox:
            await asyncio.gather(*[outbox.append(0, bytes(1000)) for _ in range(50)])

    asyncio.run(main())
    assert count == 50


def test_a_serializer_that_is_asked_often_is_asked_in_a_thread_until_it_answers(tmp_path):
    away = True

    def serializer(value):
        assert threading.current_thread() is not threading.main_thread() or not away
        if away:
            raise ConnectionError("the registry is away")
        return value

    async def main():
        nonlocal away
        async with AsyncOutbox.open(
            tmp_path, topic="orders", partitions=1, producer="billing", serializer=serializer
        ) as outbox:
            for _ in range(3):
                with pytest.raises(ConnectionError):
                    await outbox.append(0, b"x")
            away = False
            assert await (await outbox.append(0, b"x")) == 0

    asyncio.run(main())


def test_none_is_not_serialized():
    assert Serializer("serializer", lambda _: 1 / 0, "orders", "value")(None) is None


TIME_END_MS = 1 << 62
POSITION = StreamMetadata(7, 0, 0)


@pytest.mark.parametrize(
    ("columns", "refused"),
    [
        ({"timestamps_ms": 0}, None),
        ({"timestamps_ms": TIME_END_MS - 1}, None),
        ({"timestamps_ms": (0, TIME_END_MS - 1)}, None),
        ({"timestamps_ms": np.array([1, 2])}, None),
        ({"metadata": POSITION}, None),
        ({"metadata": [POSITION]}, "metadata: has 1 entries for 2 values"),
        ({"metadata": [POSITION, None]}, "metadata: give a StreamMetadata, or one per record"),
        ({"metadata": 5}, "metadata: give a list, not int"),
        ({"timestamps_ms": 1.5}, "timestamps_ms: give a list, not float"),
        ({"timestamps_ms": [1, 2, 3]}, "timestamps_ms: has 3 entries for 2 values"),
        ({"timestamps_ms": [1, 2.0]}, r"timestamps_ms\[1\]: give whole milliseconds since 1970 UTC, not 2.0"),
        ({"timestamps_ms": [True, 1]}, r"timestamps_ms\[0\]: give whole milliseconds since 1970 UTC, not True"),
        ({"timestamps_ms": True}, "timestamps_ms: give whole milliseconds since 1970 UTC, not True"),
        ({"timestamps_ms": -1}, "timestamps_ms: -1 is not a time"),
        ({"timestamps_ms": [5, TIME_END_MS]}, "timestamps_ms: 4611686018427387904 is not a time"),
        ({"timestamps_ms": [-1, 5]}, "timestamps_ms: -1 is not a time"),
    ],
)
def test_columns_of_many_records_are_checked_before_any_of_them_is_taken(columns, refused):
    given = {"keys": None, "headers": None, "timestamps_ms": None, "metadata": None, **columns}
    rules = RecordRules("key", 10_000)
    if refused is None:
        taken = rules.many([b"a", b"b"], **given)
        assert taken.values == [b"a", b"b"]
        assert taken.timestamps_ms is None or {type(one) for one in taken.timestamps_ms} == {int}
    else:
        with pytest.raises(RecordRefused, match=f"^{refused}"):
            rules.many([b"a", b"b"], **given)


@pytest.mark.parametrize("time_ms", [-1, TIME_END_MS, True, 1.0, "5"])
def test_the_time_of_one_record_is_checked_like_those_of_many(time_ms):
    rules = RecordRules("key", 10_000)
    with pytest.raises(RecordRefused, match=r"^timestamp_ms: "):
        rules.one(b"a", None, (), time_ms, None)
    for fits_ms in (0, TIME_END_MS - 1):
        assert rules.one(b"a", None, (), fits_ms, None).timestamps_ms == (fits_ms,)
