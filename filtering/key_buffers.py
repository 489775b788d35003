"""Arrow binary columns read through their buffers, so that this package needs no Arrow library.

    binary / large_binary     | validity bits | offsets i32 / i64 (n + 1) | data |
    fixed_size_binary[w]      | validity bits | data: n x w               |

A slice keeps its parent's buffers and says where it begins by `.offset`; a validity bit of 0 is a null, bits count
from the lowest. Source: the Arrow columnar format, version 1.5, "Variable-size Binary Layout".
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from filtering.errors import UnsupportedKeys

Rows = npt.NDArray[np.uint8]
Present = npt.NDArray[np.bool_]

_OFFSET_TYPES: "dict[str, np.dtype[Any]]" = {"binary": np.dtype("<i4"), "large_binary": np.dtype("<i8")}
_FIXED = "fixed_size_binary["


def is_arrow(keys: object) -> bool:
    """Whether this is an Arrow array (it shows its buffers) or a chunked one (it shows its chunks)."""
    return hasattr(keys, "buffers") or hasattr(keys, "iterchunks")


def rows_of_arrow(keys: Any, width: int) -> tuple[Rows, Present | None]:
    """The column as bytes of shape (n, width), and which rows hold exactly `width` bytes (None: all of them).

    Rows without are filled with zeros. Raises UnsupportedKeys for a column that holds no bytes.
    """
    if not hasattr(keys, "iterchunks"):
        return _rows_of_array(keys, width)
    parts = [_rows_of_array(chunk, width) for chunk in keys.iterchunks()]
    if len(parts) == 1:
        return parts[0]
    if all(present is None for _, present in parts):
        return np.concatenate([np.empty((0, width), np.uint8), *(rows for rows, _ in parts)]), None
    presents = [np.ones(len(rows), np.bool_) if present is None else present for rows, present in parts]
    return np.concatenate([rows for rows, _ in parts]), np.concatenate(presents)


def _rows_of_array(array: Any, width: int) -> tuple[Rows, Present | None]:
    kind, count = str(array.type), len(array)
    if kind == "null" or count == 0:
        return np.zeros((count, width), np.uint8), np.zeros(count, np.bool_) if count else None
    if kind.startswith(_FIXED):
        return _fixed(array, int(kind[len(_FIXED) : -1]), width)
    if kind in _OFFSET_TYPES:
        return _variable(array, _OFFSET_TYPES[kind], width)
    raise UnsupportedKeys(f"an Arrow column of {kind}")


def _fixed(array: Any, own_width: int, width: int) -> tuple[Rows, Present | None]:
    count = len(array)
    validity, data = array.buffers()
    if own_width != width:
        return np.zeros((count, width), np.uint8), np.zeros(count, np.bool_)
    start = array.offset * width
    rows = np.frombuffer(data, np.uint8)[start : start + count * width].reshape(count, width)
    return rows, _validity(array, validity)


def _variable(array: Any, offset_type: "np.dtype[Any]", width: int) -> tuple[Rows, Present | None]:
    count = len(array)
    validity, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, offset_type)[array.offset : array.offset + count + 1].astype(np.int64, copy=False)
    content = np.frombuffer(data if data is not None else b"", np.uint8)
    present = _validity(array, validity)
    fits = (bounds[1:] - bounds[:-1]) == width
    if present is None and fits.all():
        return content[bounds[0] : bounds[-1]].reshape(count, width), None
    present = fits if present is None else present & fits
    rows = np.zeros((count, width), np.uint8)
    if present.any():
        # Every start position seen as one element of `width` bytes: a gather without a Python step per row.
        windows = np.ndarray((len(content) - width + 1,), np.dtype((np.void, width)), content.data, strides=(1,))
        rows[present] = windows[bounds[:-1][present]].view(np.uint8).reshape(-1, width)
    return rows, present


def _validity(array: Any, validity: Any) -> Present | None:
    if validity is None or array.null_count == 0:
        return None
    start, count = array.offset, len(array)
    octets = np.frombuffer(validity, np.uint8)[start // 8 : (start + count + 7) // 8]
    return np.unpackbits(octets, bitorder="little")[start % 8 : start % 8 + count].astype(np.bool_)
