"""Records of any shape: their parts in a list and one join, so that no byte of a value moves more than once.

    parts   reserved | length, head, size, value, tail | length, head, size, value, tail | ...
    head    attributes, time delta, offset delta, key       tail    headers

Lengths and small deltas come ready-made from a table. The layout of a record is drawn in encoder.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import add

from pushrep.records.model import Header
from pushrep.records.varint import SMALL_VARINTS, VARINTS, varint

NULL = varint(-1)
NO_HEADERS = varint(0)
ONE_HEADER = varint(1)
_KEYLESS = [b"\0\0" + offset_delta + NULL for offset_delta in SMALL_VARINTS]  # attributes, a time delta of 0 ...


def encode_concatenating(
    heads: list[bytes], values: Sequence[bytes | None], tails: Iterable[bytes], reserved: int
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records."""
    try:
        # A list is indexed faster than the dictionary that knows every number; it ends at records of 16 KiB, where a
        # second pass costs little beside the bytes.
        return _join(heads, values, tails, SMALL_VARINTS, reserved)
    except IndexError:
        return _join(heads, values, tails, VARINTS, reserved)


def keyless_heads(count: int) -> list[bytes]:
    """The heads of `count` records with null keys and a time delta of 0."""
    more = range(len(_KEYLESS), count)
    return _KEYLESS[:count] + [b"\0\0" + VARINTS[offset] + NULL for offset in more]


def equal_key_heads(keys: Sequence[bytes], key_bytes: int) -> list[bytes]:
    """The heads of records with keys of one size and a time delta of 0, in a quarter of the time of `heads`."""
    return list(map(add, _starts(len(keys), key_bytes), keys))


def encode_equal(
    keys: Sequence[bytes] | None, key_bytes: int, values: Sequence[bytes], value_bytes: int, reserved: int
) -> bytearray:
    """What `encode_joined` makes of keys of one size, or none, and values of one size, without headers and deltas.

    In half the time: all but the keys and values are from a table, and no step is taken for a single record.
    """
    count = len(values)
    starts = _equal_starts(count, None if keys is None else key_bytes, value_bytes)
    if keys is None:
        parts = [b""] * (2 * count)
        parts[0::2], parts[1::2] = starts, values
    else:
        parts = [VARINTS[value_bytes]] * (4 * count)
        parts[0::4], parts[1::4], parts[3::4] = starts, keys, values
    parts[0] = bytes(reserved) + parts[0][len(NO_HEADERS) :]
    parts.append(NO_HEADERS)
    return bytearray().join(parts)


@lru_cache(maxsize=64)
def _equal_starts(count: int, key_bytes: int | None, value_bytes: int) -> list[bytes]:
    """The tail of the record before, then what comes before each key, or before each value where there are no keys."""
    size = VARINTS[value_bytes]
    key_size, behind = (NULL, size) if key_bytes is None else (VARINTS[key_bytes], b"")
    heads = [b"\0\0" + VARINTS[offset] + key_size for offset in range(count)]
    more = (key_bytes or 0) + len(size) + value_bytes + len(NO_HEADERS)
    return [NO_HEADERS + VARINTS[len(head) + more] + head + behind for head in heads]


@lru_cache(maxsize=64)
def _starts(count: int, key_bytes: int) -> list[bytes]:
    return [b"\0\0" + VARINTS[offset] + VARINTS[key_bytes] for offset in range(count)]


def heads(count: int, keys: Sequence[bytes | None] | None, time_deltas: list[int] | None) -> list[bytes]:
    """The heads of any `count` records. No keys: null. No deltas: all are 0."""
    times = repeat(b"\0\0", count) if time_deltas is None else [b"\0" + VARINTS[time] for time in time_deltas]
    if keys is None:
        return [time + VARINTS[offset] + NULL for offset, time in enumerate(times)]
    return [
        time + VARINTS[offset] + (NULL if key is None else VARINTS[len(key)] + key)
        for offset, (time, key) in enumerate(zip(times, keys, strict=True))
    ]


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
