"""What one AppendRecords costs beside its batches: message, header, frame, of the request and its answer, at both ends.

The peer is fastavro alone, which writes and reads the same two headers from ready dictionaries: no frame, no CRC, no
checks, no objects. One 64 KiB batch a partition is in every request and is not touched.
"""

import gc
import timeit
from io import BytesIO
from typing import Any
from uuid import UUID

from fastavro import parse_schema, schemaless_reader, schemaless_writer

from benchmarks.harness import compare, random_values
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import encode, open_frame
from pushrep.wire.codec import read_schemas
from pushrep.wire.frames import PREFIX_BYTES, FrameLimits, FrameReader
from pushrep.wire.push_messages import (
    AppendRecordsPartition,
    AppendRecordsRequest,
    AppendRecordsResponse,
    AppendRecordsResult,
)
from pushrep.wire.values import Struct

(BATCH,) = random_values(1, 64 << 10)
TIMES = 2_000
GOAL_US = 15


def request(partitions: int) -> AppendRecordsRequest:
    return AppendRecordsRequest(
        partitions=tuple(
            AppendRecordsPartition(
                tp=TP[number],
                leader_epoch=256,
                replica_epoch=7,
                session_id=12_345,
                append_offset=1_000_000_000 + number,
                previous_epoch=256,
                epoch_start_offset=900_000_000,
                high_watermark=1_000_000_000,
                log_start_offset=0,
                records=(BATCH,),
            )
            for number in range(partitions)
        )
    )


def response(partitions: int) -> AppendRecordsResponse:
    result = {"log_end_offset": 1_000_000_700, "flushed_offset": 1_000_000_700, "grant_epoch": 256, "grant_leader": 0}
    return AppendRecordsResponse(results=tuple(AppendRecordsResult(**result) for _ in range(partitions)))


TP = [TopicIdPartition(UUID(int=1 << 64), "orders", number) for number in range(100)]


def wire(message: Struct) -> bytes:
    return b"".join(encode(message, 1))


def header_of(message: Struct) -> bytes:
    head = bytes(encode(message, 1)[0])
    return head[PREFIX_BYTES:]


def steps(partitions: int) -> dict[str, Any]:
    """The four steps of a request, each with the making or the reading of its message."""
    reader = FrameReader(open_frame, FrameLimits(frame_bytes_max=1 << 30))
    asked, answered = wire(request(partitions)), wire(response(partitions))
    return {
        "encode request": lambda: encode(request(partitions), 1),
        "decode request": lambda: reader.feed(asked),
        "encode answer": lambda: encode(response(partitions), 1),
        "decode answer": lambda: reader.feed(answered),
    }


def ours(partitions: int) -> Any:
    work = list(steps(partitions).values())

    def side() -> float:
        for _ in range(TIMES // partitions):
            for step in work:
                step()
        return TIMES // partitions * partitions

    return side


def fastavro_alone(partitions: int) -> Any:
    schemas = read_schemas()
    work = []
    for message in (request(partitions), response(partitions)):
        schema = parse_schema(schemas[type(message).__name__])
        header = header_of(message)
        work.append((schema, header, schemaless_reader(BytesIO(header), schema, None)))

    def side() -> float:
        for _ in range(TIMES // partitions):
            for schema, header, datum in work:
                schemaless_writer(BytesIO(), schema, datum)
                schemaless_reader(BytesIO(header), schema, None)
        return TIMES // partitions * partitions

    return side


def run(rounds: int) -> dict[str, Any]:
    results = {}
    for partitions in (1, 100):
        sides = {"pushrep, all of it": ours(partitions), "fastavro alone": fastavro_alone(partitions)}
        title = f"AppendRecords and its answer, {partitions} partition{'s' if partitions > 1 else ''} a request"
        result = compare(sides, rounds=max(rounds, 5), unit="partitions/s")
        microseconds = {name: 1e6 / rate["median"] for name, rate in result["rates"].items()}
        told = ", ".join(f"{name} {value:.1f}" for name, value in microseconds.items())
        result["notes"] = [f"µs a partition: {told}", f"µs by step (best of many): {best(partitions)}"]
        if partitions == 1:
            met = "met" if microseconds["pushrep, all of it"] < GOAL_US else "missed"
            result["notes"].append(f"aimed at {GOAL_US} µs: {met}")
        results[title] = result
    return results


def best(partitions: int) -> str:
    """Each step's best time over short runs, which a busy machine disturbs least."""
    gc.collect()
    count = max(1, 300 // partitions)
    parts = []
    for name, step in steps(partitions).items():
        seconds = min(timeit.repeat(step, number=count, repeat=50)) / count / partitions
        parts.append(f"{name} {seconds * 1e6:.1f}")
    return ", ".join(parts)
