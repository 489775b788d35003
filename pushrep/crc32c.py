"""CRC-32C in C, from one of two libraries; in Python it is more than a hundred times slower, and says so once.

google-crc32c has no wheel for musl (Alpine): there pip builds it without its C part. The package `crc32c` has such
wheels and is taken if it is installed. It is no dependency: on glibc nobody needs it, and it is under the LGPL.
"""

import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # it says to build the C part; ours says what helps at once
    import google_crc32c

SLOW = "CRC-32C is computed in Python here, over 100 times slower than in C, for every record: `pip install crc32c`"

Crc = Callable[[Any], int]


def _best() -> tuple[Crc, Callable[[int, Any], int]]:
    if google_crc32c.implementation != "c":
        try:
            from crc32c import crc32c  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - see above
        except ImportError:
            warnings.warn(SLOW, RuntimeWarning, stacklevel=2)
        else:
            return crc32c, lambda crc, data: crc32c(data, crc)
    return google_crc32c.value, google_crc32c.extend


crc32c_value, crc32c_extend = _best()
"""The CRC-32C of data; and, for a CRC and data, that of what had this CRC with the data behind it."""
