"""The replay filter in plain Python beside a Python set of keys, one record at a time and a batch at a time.

Both sides see the same rows: keys of 20 bytes as a consumer hands them out, every tenth batch of a pair sent again.
The set remembers every key, the filter one number a pair. Keys are new objects in every round, for a `bytes` keeps its
hash once computed and a consumer's keys were never hashed before; making them is not timed. By batch the filter reads
the contiguous bytes (an Arrow column or `pack_keys`) or a list of keys, the set that list by its fastest way in bulk.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import spread
from filtering import ReplayFilter

RECORDS = 4_000_000
BATCH = 65_536
PAIRS = 16
RUN = 500  # records that follow one another from one producer's batch
SEED = 7
# Title: our side, its peer, the least ratio wanted.
COMPARED = {
    "one by one": ("filter, one by one", "set, one by one", 1.0),
    "by batch": ("filter, by batch", "set, by batch", 2.0),
    "by batch, the filter too from a list of keys": ("filter, by batch of a list", "set, by batch", 2.0),
}


def run(rounds: int) -> dict[str, Any]:
    """Two results by title; each round runs filter, set, filter, set ... after one warm-up of all."""
    blob = rows()
    sides: dict[str, Callable[[bytes, list[bytes]], tuple[int, float]]] = {
        "filter, one by one": filter_one_by_one,
        "set, one by one": set_one_by_one,
        "filter, by batch": filter_by_batch,
        "filter, by batch of a list": filter_by_list,
        "set, by batch": set_by_batch,
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        kept = {name: side(blob, keys_of(blob)) for name, side in sides.items()}
        counts = {count for count, _ in kept.values()}
        if len(counts) != 1:
            raise AssertionError(f"the sides disagree about what passes: {kept}")
        if round_number:  # the first one is a warm-up
            for name, (_, seconds) in kept.items():
                rates[name].append(len(blob) / 20 / seconds)
    return {title: result(title, rates, rounds) for title in COMPARED}


def result(title: str, rates: dict[str, list[float]], rounds: int) -> dict[str, Any]:
    """One table: the filter and its peer."""
    ours, peer, goal = COMPARED[title]
    ratios = [mine / theirs for mine, theirs in zip(rates[ours], rates[peer], strict=True)]
    return {
        "unit": "records/s",
        "rounds": rounds,
        "ours": ours,
        "rates": {name: spread(rates[name]) for name in (ours, peer)},
        "ratios": {peer: spread(ratios) | {"goal": goal}},
        "notes": [f"{RECORDS:,} records of {PAIRS} pairs in runs of {RUN}, every tenth run a replay"],
    }


def rows() -> bytes:
    """The keys of all records, contiguous: runs of the pairs in random order, every tenth run sent a second time."""
    rng = np.random.default_rng(SEED)
    pair_of_run = rng.integers(0, PAIRS, RECORDS // RUN)
    first_of_run = np.zeros(len(pair_of_run), np.int64)
    for pair in range(PAIRS):
        mine = np.flatnonzero(pair_of_run == pair)
        again = np.arange(len(mine)) % 10 == 9
        first_of_run[mine] = (np.cumsum(~again) - 1) * RUN
    keys = np.empty(RECORDS, np.dtype([("pid", ">i8"), ("partition", ">i4"), ("offset", ">i8")]))
    keys["pid"] = np.repeat(pair_of_run, RUN) * 7919 + 1
    keys["partition"] = np.repeat(pair_of_run, RUN)
    keys["offset"] = np.repeat(first_of_run, RUN) + np.tile(np.arange(RUN), len(pair_of_run))
    return keys.tobytes()


def keys_of(blob: bytes) -> list[bytes]:
    """The keys as objects that nobody has hashed yet."""
    return [blob[place : place + 20] for place in range(0, len(blob), 20)]


def filter_one_by_one(_blob: bytes, keys: list[bytes]) -> tuple[int, float]:
    replay_filter = ReplayFilter()
    kept, began = 0, time.perf_counter()
    for key in keys:
        if replay_filter.admit(key):
            kept += 1
    return kept, time.perf_counter() - began


def set_one_by_one(_blob: bytes, keys: list[bytes]) -> tuple[int, float]:
    seen: set[bytes] = set()
    kept, began = 0, time.perf_counter()
    for key in keys:
        if key not in seen:
            seen.add(key)
            kept += 1
    return kept, time.perf_counter() - began


def filter_by_batch(blob: bytes, _keys: list[bytes]) -> tuple[int, float]:
    replay_filter, view = ReplayFilter(), memoryview(blob)
    kept, began = 0, time.perf_counter()
    for start in range(0, len(blob), BATCH * 20):
        kept += int(replay_filter.admit_batch(view[start : start + BATCH * 20]).sum())
    return kept, time.perf_counter() - began


def filter_by_list(_blob: bytes, keys: list[bytes]) -> tuple[int, float]:
    replay_filter = ReplayFilter()
    kept, began = 0, time.perf_counter()
    for start in range(0, len(keys), BATCH):
        kept += int(replay_filter.admit_batch(keys[start : start + BATCH]).sum())
    return kept, time.perf_counter() - began


def set_by_batch(_blob: bytes, keys: list[bytes]) -> tuple[int, float]:
    seen: set[bytes] = set()
    kept, began = 0, time.perf_counter()
    for start in range(0, len(keys), BATCH):
        fresh = set(keys[start : start + BATCH]) - seen
        kept += len(fresh)
        seen |= fresh
    return kept, time.perf_counter() - began
