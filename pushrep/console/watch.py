"""Reads the status of each place periodically, as `pushrep status` does, and keeps the last hour.

    arguments ─ searched every 10 s ─▶ outboxes, nodes ─ a thread pool ─ look_at ─▶ Reading ─▶ pages.py
                                                                          └─▶ past: a point each 10 s, for an hour

The page of one place reads its status again; the page of all places shows the newest reading of each. The watch reads a
slow place less often. Eight threads read places, so up to seven that do not answer do not delay the others. A Reading
does not change.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext
from time import monotonic
from typing import Any, NamedTuple

from pushrep.cli.status import look_at
from pushrep.env import SYSTEM_CLOCK
from pushrep.log.directory_files import OUTBOX_FILE_NAME, outboxes_at, slot_directories
from pushrep.log.errors import NotALog
from pushrep.log.inspection import logs_at
from pushrep.replicate.election_state import REPLICA_EPOCH_NAME

_LOG = logging.getLogger("pushrep.console")
STEP_S = 10.0
PAST_S = 3600
_DEPTH = 3  # <argument>/<node>/<outbox id>/outbox.json
_WORKERS = 8
_REST = 10  # the least pause before the next reading, as a multiple of the duration of the last one
_FRESH_S = 1.0  # one reading answers all requests within this time


class Point(NamedTuple):
    """An outbox at one moment. `at_s` is monotonic; lags are in records, None if they are unknown."""

    at_s: float
    end: int
    replica_lag: int | None
    topic_lag: int | None
    disk_used: int | None


class Reading(NamedTuple):
    """The status of a place at one moment. found: its PLACE of `pushrep status --json`."""

    name: str
    found: Mapping[str, Any]
    at_ms: int
    past: Sequence[Point] = ()

    @property
    def replica_lag(self) -> int | None:
        """Records that the slowest replica has not acknowledged; None if there is no replica or no leader."""
        return max((one["lag"]["records"] for one in self.found.get("members", ()) if one["lag"]), default=None)

    @property
    def topic_lag(self) -> int | None:
        """Records that the slowest topic has not acknowledged; None if the outbox ships to no topic."""
        return max((one["records"] for one in self.found.get("destinations", ())), default=None)


@dataclass(slots=True)
class _Watched:
    place: str
    due_s: float = 0.0
    is_asked: bool = False
    past: "deque[Point]" = field(default_factory=lambda: deque(maxlen=int(PAST_S / STEP_S) + 1))
    reading: Reading | None = None
    whole: tuple[float, Reading] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class PlaceWatch:
    """Watches all outboxes and nodes in or below some directories, or at addresses. Thread-safe; `start`, then `stop`.

    every_s: seconds between two readings of a place.
    """

    def __init__(self, places: Iterable[str], tls: SSLContext | None = None, *, every_s: float = 2.0) -> None:
        self._given, self._tls, self._every_s = tuple(places), tls, every_s
        self._watched: dict[str, _Watched] = {}
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="pushrep-console")
        self._thread = threading.Thread(target=self._run, name="pushrep-console-watch", daemon=True)
        self.empty: Sequence[str] = ()
        """The given directories that hold nothing of pushrep yet."""

    def start(self) -> None:
        """Start the threads. Returns after the first reading of each place, or after `every_s` + 3 seconds."""
        self._find()
        futures = [self._ask(name, one) for name, one in self._watched.items()]
        until = monotonic() + self._every_s + 3
        for future in futures:
            try:
                future.result(max(0.0, until - monotonic()))
            except TimeoutError:
                break
        self._thread.start()

    def stop(self) -> None:
        """Stop the threads. When this returns they have ended, except those that wait for the answer of a place."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def readings(self) -> list[Reading]:
        """The newest reading of each place."""
        return [one.reading for one in list(self._watched.values()) if one.reading is not None]

    def newest(self, name: str) -> Reading | None:
        """The newest reading of one place; None if there is no place of that name, or no reading yet."""
        one = self._watched.get(name)
        return None if one is None else one.reading

    def ask(self, name: str) -> Reading | None:
        """Read one place now, with an outbox's partitions; None if there is no place of that name."""
        one = self._watched.get(name)
        if one is None:
            return None
        with one.lock:  # requests that wait here get the same reading
            if one.whole is None or monotonic() - one.whole[0] > _FRESH_S:
                one.whole = monotonic(), self._read(name, one, with_partitions=True)
            return one.whole[1]

    def _run(self) -> None:
        found_s = monotonic()
        while not self._stopping.wait(min(0.2, self._every_s)):
            now = monotonic()
            if now - found_s > STEP_S:
                self._find()
                found_s = now
            for name, one in self._watched.items():
                if not one.is_asked and now >= one.due_s:
                    self._ask(name, one)

    def _find(self) -> None:
        below = {given: places_below(given) for given in self._given}
        self.empty = [given for given, places in below.items() if not places]
        found = dict(_named(place for places in below.values() for place in places))
        self._watched = {name: self._watched.get(name) or _Watched(place) for name, place in found.items()}

    def _ask(self, name: str, one: _Watched) -> "Future[None]":
        one.is_asked = True
        return self._pool.submit(self._look, name, one)

    def _look(self, name: str, one: _Watched) -> None:
        began_s = monotonic()
        try:
            one.reading = reading = self._read(name, one)
            _remember(one.past, reading)
        except Exception:  # noqa: BLE001 - the other places must still be shown
            _LOG.exception("%s can't be read", one.place)
        finally:
            ended_s = monotonic()
            one.due_s = ended_s + max(self._every_s, _REST * (ended_s - began_s))
            one.is_asked = False

    def _read(self, name: str, one: _Watched, *, with_partitions: bool = False) -> Reading:
        found = look_at(one.place, self._tls, with_partitions=with_partitions)[0]
        return Reading(name, found, SYSTEM_CLOCK.wall_ms(), tuple(one.past))


def places_below(given: str) -> list[str]:
    """The outboxes and nodes in or below a directory; nothing if it holds none and no logs. An address is a place
    itself, and so is a wrong path: its problem is then shown.
    """
    path = Path(given)
    return list(_found_in(path, _DEPTH)) or ([] if _holds_nothing(path) else [given])


def _holds_nothing(path: Path) -> bool:
    """Whether it is a directory, and holds no logs."""
    try:
        next(path.iterdir(), None)
        logs_at(path)
    except NotALog:
        return True
    except OSError:
        return False
    return False


def _found_in(path: Path, depth: int) -> Iterator[str]:
    if (path / OUTBOX_FILE_NAME).exists() or slot_directories(path):
        yield from map(str, outboxes_at(path))
        return
    if (path / REPLICA_EPOCH_NAME).exists():
        yield str(path)  # the search continues below: a service may lead an outbox there
    try:
        below = sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink()) if depth else []
    except OSError:
        return
    for one in below:
        yield from _found_in(one, depth - 1)


def _named(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Short names that do not change while the places exist."""
    short: dict[str, list[str]] = {}
    for place in sorted(set(places)):
        path = Path(place).absolute()
        is_slot = path.name.startswith("slot-")
        short.setdefault(f"{path.parent.name}.{path.name}" if is_slot else path.name, []).append(place)
    for name, same in short.items():
        for number, place in enumerate(same, 1):
            yield (name if number == 1 else f"{name}~{number}"), place


def _remember(past: "deque[Point]", reading: Reading) -> None:
    """Add the reading to `past`: one point for each STEP_S, the last of which is the newest reading."""
    if (end := reading.found.get("log_end_offsets")) is None:
        return
    used = (reading.found.get("disk") or {}).get("used_bytes")
    point = Point(monotonic(), end, reading.replica_lag, reading.topic_lag, used)
    if len(past) > 1 and past[-1].at_s - past[-2].at_s < STEP_S:
        past[-1] = point
    else:
        past.append(point)
