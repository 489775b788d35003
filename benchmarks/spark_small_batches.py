"""What a micro-batch of 10 rows costs in foreachBatch, where the filter has next to nothing to do (G26).

    Parquet (a file a batch, 10 records of one pair) ─▶ 40 batches of a stream ─▶ noop sink

Beside no filter; and the marks' store alone, whose calls a batch makes: what was written last, the batch before, this
one, and the write, which is on disk when it returns.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import compare, spread
from benchmarks.spark_filter import VALUE_BYTES, Bench, schema, session
from filtering import HighwaterMarks
from filtering.stream_metadata import KEY_BYTES, pack_keys
from spark_jobs import FileMarks
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey

BATCHES, ROWS = 40, 10
WARM_UPS = 3
KEPT = 101
"""Batches of marks that Spark's default keeps, and one."""


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-small-") as place:
        home = Path(place)
        write_batches(home / "tiny")
        spark = session(place)
        bench = Bench(spark, home, "tiny", batches=True, records=BATCHES)
        try:
            result = compare(
                {"ReplayFilteredBatches": bench.filtered, "no filter": bench.unfiltered},
                rounds=rounds,
                unit="batches/s",
                warm_ups=WARM_UPS,
            )
        finally:
            spark.stop()
        ours, none = (1000 / result["rates"][name]["median"] for name in ("ReplayFilteredBatches", "no filter"))
        store_ms = spread(of_the_store(home / "marks"))
        result["notes"] = [
            f"a batch takes {ours:.0f} ms, {ours - none:.0f} more than without the filter ({none:.0f})",
            f"its marks' store alone takes {store_ms['median']:.1f} ms of these, {KEPT} batches kept",
        ]
        return {f"batches of {ROWS} rows": result}


def of_the_store(directory: Path) -> list[float]:
    """Milliseconds of a batch's calls of the store, of each batch once as many are kept as ever are."""
    store, taken_ms = FileMarks(directory), []
    for number in range(2 * KEPT):
        marks = HighwaterMarks.from_columns(range(16), [0] * 16, [number] * 16, 0)
        began_s = time.perf_counter()
        if (owner := store.owner()) is not None:
            store.read(owner, store.batches(owner)[-1])
            store.read(owner, number)
        store.write(BatchMarks("q", number, (LogRange("t", 0, number, number + 1),), {MarksKey("t"): marks}), keep=KEPT)
        taken_ms.append(1000 * (time.perf_counter() - began_s))
    return taken_ms[KEPT:]


def write_batches(directory: Path) -> None:
    directory.mkdir()
    for number in range(BATCHES):
        first = number * ROWS
        keys = pack_keys(7, 0, first, ROWS)
        rows = {
            "key": [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)],
            "value": [b"v" * VALUE_BYTES] * ROWS,
            "topic": ["orders"] * ROWS,
            "partition": [0] * ROWS,
            "offset": [*range(first, first + ROWS)],
            "timestamp": [1_700_000_000_000_000] * ROWS,
        }
        pq.write_table(pa.table(rows, schema=schema()), directory / f"{number:04d}.parquet")
