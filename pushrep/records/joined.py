"""Records of any shape: their parts in a list and one join, so that no byte of a value moves more than once.

    parts   reserved | length, head, size, value, tail | length, head, size, value, tail | ...
    head    attributes, time delta, offset delta, key       tail    headers

Lengths and small deltas come ready-made from a table. The layout of a record is drawn in encoder.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from pushrep.records.model import Header
from pushrep.records.varint import SMALL_VARINTS, VARINTS, varint

NULL = varint(-1)
NO_HEADERS = varint(0)
ONE_HEADER = varint(1)
_PREFIXES = [b"\0\0" + offset_delta for offset_delta in SMALL_VARINTS]  # attributes and a time delta of 0
_KEYLESS = [prefix + NULL for prefix in _PREFIXES]


def encode_joined(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    tails: Iterable[bytes],
    time_deltas: list[int] | None,
    reserved: int,
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records. No keys: null. No deltas: all are 0."""
    heads = _heads(len(values), keys, time_deltas)
    try:
        # A list is indexed faster than the dictionary that knows every number; it ends at records of 16 KiB, where a
        # second pass costs little beside the bytes.
        return _join(heads, values, tails, SMALL_VARINTS, reserved)
    except IndexError:
        return _join(heads, values, tails, VARINTS, reserved)


def header_tails(headers: Sequence[Iterable[Header]] | None) -> Iterable[bytes]:
    """The encoded headers of each record; without headers an endless supply of none."""
    if headers is None:
        return repeat(NO_HEADERS)
    names: dict[str, bytes] = {}  # a name comes back in every record: encode it once
    return [_header_tail(each, names) for each in headers]


def header_column_tails(name: str, values: Sequence[bytes | None]) -> list[bytes]:
    """The encoded headers of records that have this one each."""
    start = ONE_HEADER + header_name(name)
    return [start + nullable(value) for value in values]


def header_name(name: str) -> bytes:
    """Size and UTF-8 of a header's name."""
    utf8 = name.encode()
    return VARINTS[len(utf8)] + utf8


def nullable(data: bytes | None) -> bytes:
    """Size and bytes of a key or value."""
    return NULL if data is None else VARINTS[len(data)] + data


def _join(
    heads: list[bytes],
    values: Sequence[bytes | None],
    tails: Iterable[bytes],
    varints: Sequence[bytes] | Mapping[int, bytes],
    reserved: int,
) -> bytearray:
    parts = [bytes(reserved)]
    # not strict: `tails` may be endless
    for head, value, tail in zip(heads, values, tails, strict=False):
        if value is None:
            parts += (varints[len(head) + 1 + len(tail)], head, NULL, tail)
        else:
            count = len(value)
            size = varints[count]
            parts += (varints[len(head) + len(size) + count + len(tail)], head, size, value, tail)
    return bytearray().join(parts)


def _heads(count: int, keys: Sequence[bytes | None] | None, time_deltas: list[int] | None) -> list[bytes]:
    ready = _KEYLESS if keys is None and time_deltas is None else _PREFIXES
    if time_deltas is not None:
        heads = [b"\0" + VARINTS[time] + VARINTS[offset] for offset, time in enumerate(time_deltas)]
    else:
        heads = ready[:count]
        end = NULL if ready is _KEYLESS else b""
        heads += [b"\0\0" + VARINTS[offset] + end for offset in range(len(ready), count)]
    if ready is _KEYLESS:
        return heads
    if keys is None:
        return [head + NULL for head in heads]
    return [
        head + NULL if key is None else head + VARINTS[len(key)] + key for head, key in zip(heads, keys, strict=True)
    ]


def _header_tail(headers: Iterable[Header], names: dict[str, bytes]) -> bytes:
    parts, number = [b""], 0
    for name, value in headers:
        encoded = names.get(name)
        if encoded is None:
            encoded = names[name] = header_name(name)
        if value is None:
            parts += (encoded, NULL)
        else:
            parts += (encoded, VARINTS[len(value)], value)
        number += 1
    parts[0] = VARINTS[number]
    return b"".join(parts)
