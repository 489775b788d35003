"""Options of the source: what is accepted means what Spark's users expect, what is refused is named."""

import pytest

from spark_jobs.sources.options import SPLIT_BYTES, AtOffsets, AtTimestamp, BadOption, Edge, SourceOptions

NEEDED = {"path": "/logs", "topic": "orders"}


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse(NEEDED | options)


def test_defaults_read_everything_and_lose_nothing():
    options = parse()
    assert (options.path, options.topic, options.partitions) == ("/logs", "orders", None)
    assert (options.start, options.end) == (Edge.EARLIEST, Edge.LATEST)
    assert options.fail_on_data_loss
    assert not options.include_headers
    assert options.max_records is None
    assert options.split_bytes == SPLIT_BYTES


def test_names_are_read_without_regard_to_case_as_spark_hands_them_over():
    assert parse(maxrecordspertrigger="7", INCLUDEHEADERS="TRUE") == parse(
        maxRecordsPerTrigger="7", includeHeaders="TRUE"
    )
    assert parse(maxrecordspertrigger="7").given["maxRecordsPerTrigger"] == "7"


@pytest.mark.parametrize(
    ("text", "partitions"),
    [("0", (0,)), ("0,2", (0, 2)), ("5, 0,1,1", (0, 1, 5))],
)
def test_partitions(text, partitions):
    assert parse(partitions=text).partitions == partitions


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Edge.EARLIEST),
        ("Latest", Edge.LATEST),
        ('{"orders": {"0": 23, "1": -2, "2": -1}}', AtOffsets({0: 23, 1: -2, 2: -1})),
    ],
)
def test_starting_offsets(text, start):
    assert parse(startingOffsets=text).start == start


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1356998400123", 1356998400123),
        ("2013-01-01T00:00:00Z", 1356998400000),
        ("2013-01-01T02:00:00.123+02:00", 1356998400123),
        ("1969-12-31T23:59:59.999Z", -1),
    ],
)
def test_starting_timestamp(text, ms):
    assert parse(startingTimestamp=text).start == AtTimestamp(ms)


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("64k", 64 << 10), ("2MB", 2 << 20), ("1g", 1 << 30)])
def test_sizes(text, size):
    assert parse(splitBytes=text).split_bytes == size


BAD = [
    ("kafka.bootstrap.servers", "x:9092"),
    ("startingOffset", "earliest"),
    ("partitions", ""),
    ("partitions", "a"),
    ("partitions", "-1"),
    ("partitions", "0-3"),
    ("partitions", "0,,1"),
    ("partitions", "0-99999999"),
    ("startingOffsets", "first"),
    ("startingOffsets", "{"),
    ("startingOffsets", "[]"),
    ("startingOffsets", "12"),
    ("startingOffsets", '{"other": {"0": 1}}'),
    ("startingOffsets", '{"orders": {"0": 1}, "other": {}}'),
    ("startingOffsets", '{"orders": 3}'),
    ("startingOffsets", '{"orders": {"zero": 1}}'),
    ("startingOffsets", '{"orders": {"0": -3}}'),
    ("startingOffsets", '{"orders": {"0": "1"}}'),
    ("startingOffsets", '{"orders": {"0": true}}'),
    ("startingOffsets", '{"orders": {"0": 9223372036854775808}}'),
    ("endingOffsets", "earliest"),
    ("endingOffsets", '{"orders": {"0": -2}}'),
    ("endingOffsets", "last"),
    ("startingTimestamp", "yesterday"),
    ("startingTimestamp", "2013-01-01T00:00:00"),
    ("startingTimestamp", "-5"),
    ("maxRecordsPerTrigger", "0"),
    ("maxRecordsPerTrigger", "-1"),
    ("maxRecordsPerTrigger", "1e6"),
    ("splitBytes", "64 parsecs"),
    ("minPartitions", "4"),
    ("failOnDataLoss", "no"),
    ("includeHeaders", "1"),
]


@pytest.mark.parametrize(("option", "text"), BAD, ids=[f"{option}={text}" for option, text in BAD])
def test_a_bad_option_is_refused_by_name(option, text):
    with pytest.raises(BadOption) as refusal:
        parse(**{option: text})
    assert refusal.value.option == option
    assert option in str(refusal.value), "the message names the option"
    assert refusal.value.value == text


@pytest.mark.parametrize("missing", ["path", "topic"])
@pytest.mark.parametrize("blank", [None, "", "  "])
def test_path_and_topic_are_required(missing, blank):
    options = {name: text for name, text in NEEDED.items() if name != missing}
    if blank is not None:
        options[missing] = blank
    with pytest.raises(BadOption) as refusal:
        SourceOptions.parse(options)
    assert refusal.value.option == missing


def test_two_starts_are_refused():
    with pytest.raises(BadOption) as refusal:
        parse(startingOffsets="earliest", startingTimestamp="0")
    assert refusal.value.option == "startingTimestamp"


def test_a_batch_read_refuses_what_only_a_stream_honours():
    options = parse(maxRecordsPerTrigger="5")
    options.check(stream=True)
    with pytest.raises(BadOption) as refusal:
        options.check(stream=False)
    assert refusal.value.option == "maxRecordsPerTrigger"


def test_a_batch_read_from_the_end_is_refused():
    with pytest.raises(BadOption) as refusal:
        parse(startingOffsets="latest").check(stream=False)
    assert refusal.value.option == "startingOffsets"


def test_a_stream_refuses_an_end():
    options = parse(endingOffsets="latest")
    options.check(stream=False)
    with pytest.raises(BadOption) as refusal:
        options.check(stream=True)
    assert refusal.value.option == "endingOffsets"
