"""What the fields of messages are made of: numbers with their ranges, record batches in memory or in a file.

A number's range is part of its type and is checked when a message is made, ours or the peer's, so that nobody checks it
twice: `Offset` is `int` to the type checker and "0 to 2**63 - 2" to `Struct`. "OrNone" admits -1, Kafka's word for it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, get_args, get_origin, get_type_hints
from uuid import UUID

from pushrep.errors import BadArgument
from pushrep.wire.error_codes import ErrorCode

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
OFFSET_MAX = LONG_MAX - 1  # an end offset is one more than its last record's
MEMBER_MAX = 255


@dataclass(frozen=True, slots=True)
class Within:
    """Both ends are in."""

    low: int
    high: int


Offset: TypeAlias = Annotated[int, Within(0, OFFSET_MAX)]
OffsetOrNone: TypeAlias = Annotated[int, Within(-1, OFFSET_MAX)]
Epoch: TypeAlias = Annotated[int, Within(0, INT_MAX)]
EpochOrNone: TypeAlias = Annotated[int, Within(-1, INT_MAX)]
Count: TypeAlias = Annotated[int, Within(0, INT_MAX)]
CountOrNone: TypeAlias = Annotated[int, Within(-1, INT_MAX)]
Counter: TypeAlias = Annotated[int, Within(0, LONG_MAX)]  # replica epochs, session ids, recording ids
CounterOrNone: TypeAlias = Annotated[int, Within(-1, LONG_MAX)]
TimeMs: TypeAlias = Annotated[int, Within(-1, LONG_MAX)]  # since 1970; -1 where there is none
MemberIndex: TypeAlias = Annotated[int, Within(0, MEMBER_MAX)]
MemberIndexOrNone: TypeAlias = Annotated[int, Within(-1, MEMBER_MAX)]
Long: TypeAlias = Annotated[int, Within(-LONG_MAX - 1, LONG_MAX)]


class Readable(Protocol):
    """An open file of the operating system, as `pushrep.env.File` is."""

    def fileno(self) -> int: ...
    def read_at(self, size: int, position: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Record batches that lie in a file: `size_bytes` from byte `position` on, for sendfile; the sender reads it."""

    file: Readable
    position: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.position < 0 or self.size_bytes < 0:
            raise BadArgument("FileSlice", f"{self.size_bytes} bytes at {self.position} are no part of a file")


Buffer: TypeAlias = bytes | bytearray | memoryview
Part: TypeAlias = Buffer | FileSlice
Records: TypeAlias = tuple[Part, ...]
"""Whole record batches in log order, in as many pieces as they lie in. A decoded message has at most one piece."""


def size_of(records: Sequence[Part]) -> int:
    """Bytes of all the pieces together."""
    size = 0
    for part in records:
        size += part.size_bytes if isinstance(part, FileSlice) else _nbytes(part)
    return size


def _nbytes(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


class Struct:
    """The base of everything that a header can hold: a frozen dataclass that refuses a number out of its range."""

    __slots__ = ()

    def __post_init__(self) -> None:
        struct: Any = type(self)
        if not _are_within(struct)(self):
            name, low, high = next(row for row in _ranges_of(struct) if not row[1] <= getattr(self, row[0]) <= row[2])
            raise BadArgument(f"{struct.__name__}.{name}", f"{getattr(self, name)} is not from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response(Struct):
    """The base of answers that say why they refuse: `error_message` is for people, and may be empty."""

    error_code: ErrorCode = ErrorCode.NONE
    error_message: str = ""

    @property
    def why(self) -> str:
        """Its message, or what its code means."""
        return self.error_message or self.error_code.meaning


@cache
def _are_within(struct: type[Any]) -> Callable[[Any], bool]:
    """Whether every number of a message is in its range: one expression, for each request makes two of them."""
    terms = [f"{low} <= value.{name} <= {high}" for name, low, high in _ranges_of(struct)]
    check: Callable[[Any], bool] = eval(f"lambda value: {' and '.join(terms) or True}")  # noqa: S307 - our own fields
    return check


def _ranges_of(struct: type[Any]) -> list[tuple[str, int, int]]:
    """(field, lowest, highest) of every number with a range."""
    return [
        (column.field, note.low, note.high)
        for column in columns_of(struct, include_extras=True).values()
        for note in notes(column.hint)
        if isinstance(note, Within) and not column.inner  # a part looks after its own
    ]


class Column(NamedTuple):
    """Where a column of a header stands in its class: in `field`, or in the field `inner` of its `part`, if any."""

    field: str
    hint: Any
    inner: str = ""
    part: type[Any] | None = None


def columns_of(struct: type[Any], *, include_extras: bool = False) -> dict[str, Column]:
    """The columns of a message, in order. Fields that it derives from others are not sent.

    A part that may be None is spread over columns: `hold: Hold | None` is `hold_epoch`, `hold_reason` and so on, each
    -1 or "" for None. A UUID that may be None is one column, zero for None.
    """
    hints = get_type_hints(struct, include_extras=include_extras)
    found: dict[str, Column] = {}
    for name in (field.name for field in fields(struct) if field.init):
        part = optional_of(hints[name])
        if part is None or part is UUID:
            found[name] = Column(name, hints[name])
            continue
        for inner, column in columns_of(part, include_extras=include_extras).items():
            found[f"{name}_{inner}"] = Column(name, column.hint, inner, part)
    return found


def optional_of(hint: Any) -> type[Any] | None:
    """X of `X | None`; None for another type."""
    kinds = get_args(hint)
    return kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else None


def notes(hint: Any) -> Iterable[Any]:
    """What `Annotated` says beside the type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()
