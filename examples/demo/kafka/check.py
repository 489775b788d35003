"""Is every flight in the PostgreSQL table once and in order? Asked of PostgreSQL, against the original file.

    original/flights.csv ─┐
    first topic (keys)   ─┼─ COPY into temporary tables ─▶ SQL ─▶ one JSON object on standard output
    second topic (keys)  ─┤
    the table            ─┘

Nothing that wrote the table helps to judge it: the file is read by PostgreSQL's own CSV reader, the topics by a plain
consumer, and what is twice in them is counted by plain SQL over the keys' three numbers, without the replay filter.
The file may lawfully hold equal rows, so rows are compared as a bag; of equal ones the table's nth is the file's nth.

Run as `python -m examples.demo.kafka.check --help`; the answer's fields are those of `examples.demo.kafka.summary`.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from examples.demo.flights import AIRPORTS, COLUMNS
from examples.demo.kafka.topics import Ends
from filtering import StreamMetadata
from pushrep.errors import PushrepError

READ_WITHIN_S: Final = 60.0
"""Without a record for so long the brokers are gone."""
_AT_ONCE, _WAIT_S = 10_000, 0.2
_TYPES: Final = {"carrier": "text", "tailnum": "text", "origin": "text", "dest": "text", "time_hour": "timestamptz"}
_EVERY: Final = ", ".join(COLUMNS)
_ROW: Final = f'(ROW({_EVERY})::text COLLATE "C")'
"""A whole row as one value that can be compared, by its bytes: the columns have the same types on both sides."""
# The departure as the demo defines it, said a second time in SQL: scheduled instant plus delay.
_DAY: Final = "((time_hour + make_interval(mins => minute + coalesce(dep_delay, 0))) AT TIME ZONE 'UTC')::date"


class TopicNotRead(PushrepError):
    """The brokers stopped to answer, or hold a record that no demo sent."""


def key_rows(servers: str, topic: str, partitions: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Of each record of a topic: partition, offset, timestamp (ms), and its key's PID, partition and offset.

    Raises TopicNotRead, KafkaException.
    """
    with closing(Ends(servers, {topic: partitions})) as asking:
        ends = asking.ask()[topic]
    settings = {"bootstrap.servers": servers, "group.id": "pushrep-demo-check", "enable.auto.commit": False}
    # A partition may end with a marker, which is no record.
    with closing(Consumer({**settings, "check.crcs": True, "log_level": 0, "enable.partition.eof": True})) as consumer:
        left = {n: end for n, end in enumerate(ends) if end > 0}
        consumer.assign([TopicPartition(topic, n, 0) for n in left])
        read_at_s = time.monotonic()
        while left:
            messages = consumer.consume(_AT_ONCE, _WAIT_S)
            if messages:
                read_at_s = time.monotonic()
            elif time.monotonic() - read_at_s > READ_WITHIN_S:
                raise TopicNotRead(f"topic {topic}: nothing came for {READ_WITHIN_S:.0f} s, {left} is not read")
            for message in messages:
                if (error := message.error()) is not None:
                    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
                        left.pop(message.partition() or 0, None)
                    elif error.fatal() or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise KafkaException(error)
                    continue
                partition, offset = message.partition(), message.offset()
                assert partition is not None and offset is not None, "only errors have none"  # noqa: PT018
                metadata = StreamMetadata.try_unpack(message.key())
                if metadata is None:
                    raise TopicNotRead(f"record {offset} of {topic}-{partition} has a key that is none of ours")
                yield partition, offset, message.timestamp()[1], metadata.pid, metadata.partition, metadata.offset
                if offset + 1 >= left.get(partition, 0):
                    left.pop(partition, None)


def load_original(connection: Any, original: Path) -> None:
    """The file as the view of a temporary table `original`: its rows, and of each its number within its airport."""
    declared = ", ".join(f"{name} {_TYPES.get(name, 'integer')}" for name in COLUMNS)
    connection.execute(f"CREATE TEMPORARY TABLE lines (line bigserial, {declared})")
    with (
        original.open("rb") as file,
        connection.cursor().copy(f"COPY lines ({_EVERY}) FROM STDIN WITH (FORMAT csv, HEADER true, NULL 'NA')") as copy,
    ):
        while data := file.read(1 << 16):
            copy.write(data)
    connection.execute(f"""
        CREATE TEMPORARY TABLE original AS
        SELECT {_EVERY}, {_ROW} AS whole,
               row_number() OVER (PARTITION BY origin ORDER BY line) - 1 AS source_offset,
               row_number() OVER (PARTITION BY {_ROW} ORDER BY line) AS copy
        FROM lines
    """)


def load_topic(connection: Any, name: str, rows: Iterator[Sequence[int]]) -> None:
    """A temporary table of where each record lies and where it came from."""
    connection.execute(f"""
        CREATE TEMPORARY TABLE {name} (
            partition integer, "offset" bigint, timestamp_ms bigint,
            pid bigint, source_partition integer, source_offset bigint
        )
    """)
    with connection.cursor().copy(f"COPY {name} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def view_applied(connection: Any, table: str) -> None:
    """The job's table as `applied`, with the file's columns, where each row lay, and which of equal rows it is."""
    connection.execute(f"""
        CREATE TEMPORARY TABLE applied AS
        SELECT {_EVERY}, partition, "offset", pushrep_batch, {_ROW} AS whole,
               row_number() OVER (PARTITION BY {_ROW} ORDER BY partition, "offset") AS copy
        FROM "{table}"
    """)


def one(connection: Any, statement: str) -> dict[str, int]:
    """The only row of a query of whole numbers, by column."""
    cursor = connection.execute(statement)
    return {column.name: int(value) for column, value in zip(cursor.description, cursor.fetchone(), strict=True)}


def compare_rows(connection: Any) -> dict[str, int]:
    """`original` and `applied` as bags of rows."""
    return one(
        connection,
        """
        WITH bag AS (
            SELECT sum(in_file) AS in_file, sum(in_table) AS in_table FROM (
                SELECT whole, 1 AS in_file, 0 AS in_table FROM original
                UNION ALL SELECT whole, 0, 1 FROM applied
            ) AS sides GROUP BY whole
        )
        SELECT coalesce(sum(in_file), 0) AS flights,
               coalesce(sum(in_table), 0) AS kept,
               coalesce(sum(greatest(in_file - in_table, 0)), 0) AS missing,
               coalesce(sum(CASE WHEN in_file > 0 THEN greatest(in_table - in_file, 0) END), 0) AS twice,
               coalesce(sum(CASE WHEN in_file = 0 THEN in_table END), 0) AS "foreign"
        FROM bag
        """,
    )


def count_misplaced(connection: Any) -> int:
    """Rows of the table that come before one that the file has earlier, within their source partition."""
    found = one(
        connection,
        """
        SELECT count(*) AS misplaced FROM (
            SELECT source_offset < max(source_offset) OVER (
                       PARTITION BY origin ORDER BY partition, "offset"
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                   ) AS is_late
            FROM (SELECT origin, partition, "offset", whole, copy FROM applied) AS a
            JOIN (SELECT source_offset, whole, copy FROM original) AS o USING (whole, copy)
        ) AS placed WHERE is_late
        """,
    )
    return found["misplaced"]


def count_topic(connection: Any, name: str) -> tuple[int, int]:
    """Records of a topic, and how many of them are there for a second time."""
    found = one(
        connection,
        f"""
        SELECT coalesce(sum(times), 0) AS records, coalesce(sum(times - 1), 0) AS copies
        FROM (SELECT count(*) AS times FROM {name} GROUP BY pid, source_partition, source_offset) AS seen
        """,
    )
    return found["records"], found["copies"]


def compare_carriers(connection: Any) -> list[tuple[str, int | None, int | None]]:
    """Miles per carrier in the file and in the table; None where a side doesn't have the carrier."""
    rows: list[tuple[str, int | None, int | None]] = connection.execute("""
        SELECT carrier, o.miles, a.miles
        FROM (SELECT carrier, sum(distance) AS miles FROM original GROUP BY carrier) AS o
        FULL JOIN (SELECT carrier, sum(distance) AS miles FROM applied GROUP BY carrier) AS a USING (carrier)
        ORDER BY carrier
    """).fetchall()
    return rows


def count_days(connection: Any) -> list[tuple[str, int, int, int]]:
    """(day of departure in UTC, records in the first topic, of these again, rows of the table), ascending by day."""
    rows = connection.execute(f"""
        WITH sights AS (
            SELECT (to_timestamp(min(timestamp_ms) / 1000.0) AT TIME ZONE 'UTC')::date AS day, count(*) AS times
            FROM first GROUP BY pid, source_partition, source_offset
        ), topic_days AS (
            SELECT day, sum(times) AS appended, sum(times - 1) AS replayed FROM sights GROUP BY day
        ), table_days AS (
            SELECT {_DAY} AS day, count(*) AS kept FROM applied GROUP BY 1
        )
        SELECT day::text, coalesce(appended, 0), coalesce(replayed, 0), coalesce(kept, 0)
        FROM topic_days FULL JOIN table_days USING (day) ORDER BY day
    """).fetchall()
    return [(day, int(appended), int(replayed), int(kept)) for day, appended, replayed, kept in rows]


def rows_by_batch(connection: Any, relay_ends: dict[str, dict[str, int]]) -> tuple[dict[int, int], dict[int, int]]:
    """What of each batch of the relay is in the second topic, each record counted once, and of the apply in the table.

    `relay_ends`: by the relay's batch, the offsets of the first topic that it ended at.
    """
    relayed: dict[int, int] = {}
    before: dict[str, int] = {}
    for batch in sorted(map(int, relay_ends)):
        ends = relay_ends[str(batch)]
        relayed[batch] = sum(
            one(
                connection,
                f"SELECT count(DISTINCT source_offset) AS records FROM second WHERE source_partition = {int(partition)}"
                f" AND source_offset >= {int(before.get(partition, 0))} AND source_offset < {int(end)}",
            )["records"]
            for partition, end in ends.items()
        )
        before = ends
    applied = connection.execute("SELECT pushrep_batch, count(*) FROM applied GROUP BY pushrep_batch").fetchall()
    return relayed, {int(batch): int(rows) for batch, rows in applied}


def event_time(connection: Any, table: str, partition: str, offset: str, reached: Sequence[int]) -> int | None:
    """The latest event time (ms) of the records before the `reached` offsets, one a partition."""
    places = " OR ".join(
        f'({partition} = {int(n)} AND "{offset}" = (SELECT max("{offset}") FROM {table} '
        f'WHERE {partition} = {int(n)} AND "{offset}" < {int(end)}))'  # markers take offsets, too
        for n, end in enumerate(reached)
        if end > 0
    )
    if not places:
        return None
    found = connection.execute(f"SELECT max(timestamp_ms) FROM {table} WHERE {places}").fetchone()[0]
    return None if found is None else int(found)


_COUNTED_IN: Final = {
    "source": ("first", "source_partition", "source_offset"),
    "first": ("first", "partition", "offset"),
    "second": ("second", "partition", "offset"),
}


def find(connection: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Everything, once the tables are there. `asked`: `moments` and `relay_ends`."""
    first, first_copies = count_topic(connection, "first")
    second, second_copies = count_topic(connection, "second")
    relayed, applied = rows_by_batch(connection, asked.get("relay_ends", {}))
    return {
        **compare_rows(connection),
        "misplaced": count_misplaced(connection),
        "first": first,
        "first_copies": first_copies,
        "second": second,
        "second_copies": second_copies,
        "carriers": compare_carriers(connection),
        "days": count_days(connection),
        "moments_ms": [
            None if counted_in is None else event_time(connection, *_COUNTED_IN[counted_in], reached)
            for counted_in, reached in asked.get("moments", [])
        ],
        "relay_batches": relayed,
        "apply_batches": applied,
    }


@click.command()
@click.option("--original", type=click.Path(exists=True, path_type=Path), required=True, help="The flights, CSV.")
@click.option("--servers", required=True, help="HOST:PORT, several with commas.")
@click.option("--first", required=True, help="The topic that the outbox filled.")
@click.option("--second", required=True, help="The topic that the relay filled.")
@click.option("--database", required=True, help="postgresql://HOST/DATABASE.")
@click.option("--table", required=True, help="What the apply job filled.")
@click.option("--asked", default="{}", help="JSON: moments [[counted in, [next offsets]]], relay_ends {batch: ends}.")
def main(original: Path, asked: str, **places: str) -> None:
    """Compare the table with the original file, count both topics, and print what was found as JSON."""
    try:
        with psycopg.connect(places["database"]) as connection:
            connection.execute("SET work_mem = '128MB'")  # of this session: whole rows are sorted, four times
            load_original(connection, original)
            for name in ("first", "second"):
                load_topic(connection, name, key_rows(places["servers"], places[name], len(AIRPORTS)))
            view_applied(connection, places["table"])
            for name in ("original", "first", "second", "applied"):
                connection.execute(f"ANALYZE {name}")
            sys.stdout.write(json.dumps(find(connection, json.loads(asked))) + "\n")
    except (PushrepError, KafkaException, psycopg.Error) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
