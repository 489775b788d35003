"""The value: what each kind of place says of itself, and the same as JSON."""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, Protocol, Self, Union, get_args, get_origin, get_type_hints, is_typeddict

from filtering.replay_filter import FilterCounts
from pushrep.status.problem import PROBLEMS, Blocks, Problem, certificate_problems

REQUEST_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0)
"""Of appends and of requests to replicas and brokers."""


class CountsDurations(Protocol):
    """Counts durations in classes. `pushrep.log.disk.Durations` does."""

    bounds_s: Sequence[float]

    def read(self) -> tuple[tuple[int, ...], float]: ...


class Histogram(NamedTuple):
    """Durations in classes: the upper bound of each but the last, how many fell into it, and the sum of all."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @classmethod
    def of(cls, many: Iterable[CountsDurations]) -> Self | None:
        """The sum of `many`, which have the same bounds; None without any."""
        many = list(many)
        if not many:
            return None
        read = [one.read() for one in many]
        counts = tuple(sum(column) for column in zip(*(counts for counts, _ in read), strict=True))
        return cls(tuple(many[0].bounds_s), counts, sum(sum_s for _, sum_s in read))


class Sample(NamedTuple):
    """A metric's value. name: in FAMILIES of metrics.py."""

    name: str
    labels: Mapping[str, str]
    value: float | Histogram


class Leads(NamedTuple):
    """Who takes the records of an outbox: this process, or the member at `address` ("": nobody is known)."""

    is_here: bool
    member: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What every place has. certificates: by their use, when the one in use or its CA's expires, Unix time; None: that
    can't be read.
    """

    kind: str = "unknown"
    directory: str = ""
    address: str = ""
    certificates: Mapping[str, int | None] = field(default_factory=dict)

    def find_problems(self) -> Iterable[Problem]:
        """The problems beside those of certificates, in any order."""
        return ()

    def problems(self) -> list[Problem]:
        """What is wrong, worst first."""
        found = [*self.find_problems(), *certificate_problems(self.certificates, time.time())]
        return sorted(found, key=lambda one: one.rank)

    @property
    def problem_flags(self) -> Mapping[str, bool]:
        """For each kind of problem, whether it is there."""
        names = {one.name for one in self.problems()}
        return {name: name in names for name in PROBLEMS}

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here: what /readyz answers."""
        return not any(one.blocked is Blocks.APPENDS for one in self.problems())

    @property
    def leads(self) -> Leads:
        """What /leader answers."""
        return Leads(is_here=False)

    @property
    def own(self) -> "Status":
        """What metrics show of this process."""
        return self

    def elsewhere(self) -> Iterable[Sample]:
        """Samples of other processes that this one answers for."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """The fields and the problems as values of JSON."""
        at = shlex.quote(self.directory or self.address or "DIRECTORY")
        shown = {name: one for name, one in plain(self).items() if name != "found"}
        return {**shown, "problems": [one.as_dict(at) for one in self.problems()]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceStatus(Status):
    """A place that no process of its own speaks for: a closed node, a node seen from afar, a directory of logs, or a
    place that could not be read (kind `unknown`, with `why`). found: its problems.
    """

    state: str = "unknown"
    why: str | None = None
    pid: int | None = None
    logs: Sequence[Mapping[str, Any]] = ()
    found: tuple[Problem, ...] = ()

    def find_problems(self) -> Iterable[Problem]:
        return self.found


class FilterStatus(NamedTuple):
    """The counts of one replay filter. source: the topic, or Spark's query."""

    name: str
    source: str
    counts: FilterCounts

    @property
    def unchecked(self) -> int:
        """Records kept without a check."""
        return self.counts.unkeyed + self.counts.other_pids


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(Status):
    """A job, or a program of your own, with replay filters. found: what is wrong, which its makers find.

    name: distinguishes this job's counts from others'. counts: by topic or query, as a consumer of
    `filtering.consumers` and Spark's `CountsListener` have them.
    """

    kind: str = "job"
    name: str
    counts: Mapping[str, FilterCounts] = field(default_factory=dict)
    found: tuple[Problem, ...] = ()

    def find_problems(self) -> Iterable[Problem]:
        return self.found

    @property
    def filters(self) -> list[FilterStatus]:
        """The counts of each source."""
        return [FilterStatus(self.name, source, counts) for source, counts in dict(self.counts).items()]


def plain(value: Any) -> Any:
    """A status, or a part of one, as a value of JSON."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if isinstance(value, Mapping):
        return {key.name if isinstance(key, Enum) else key: plain(one) for key, one in dict(value).items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return {name: plain(getattr(value, name)) for name in value.__slots__} if hasattr(value, "__slots__") else value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is such as `plain` makes of that type. An object may have more fields."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in {Union, UnionType}:
        return any(fits(value, one) for one in inner)
    if outer in {int, float, str, bool, NoneType}:
        return type(value) in {outer, int} if outer is float else type(value) is outer
    if is_dataclass(outer) or is_typeddict(outer) or hasattr(outer, "_fields"):
        wanted = get_type_hints(outer)
        return isinstance(value, dict) and all(name in value and fits(value[name], wanted[name]) for name in wanted)
    if issubclass(outer, Mapping):
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if issubclass(outer, Sequence):
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    return isinstance(value, str)
