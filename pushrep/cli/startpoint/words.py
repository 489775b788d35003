"""What people type and read: places to start, durations, times. Pure.

earliest  latest  bootstrap      the ends of the log
1234                             an offset
2013-07-04T14:00                 the first record at or after it (UTC if it names no zone); @MS: ms since 1970
-90s -30m -1h -2d                so long before now
-1000 +1                         so many records from where the consumer stands
"""

import re

from pushrep.cli.common import DURATION, parse_duration_s, say_time
from pushrep.cli.input_lines import parse_time_ms
from pushrep.startpoints import Kind, Startpoint

_ENDS = {"earliest": Startpoint.earliest, "latest": Startpoint.latest, "bootstrap": Startpoint.bootstrap}


def parse_place(text: str, *, out_of_range: str = "error", reset_marks: bool = False) -> Startpoint:
    """The startpoint that `text` means. Raises ValueError that says what is wanted (BadArgument is one)."""
    words = text.strip()
    if words.lower() in _ENDS:
        return _ENDS[words.lower()](reset_marks=reset_marks)
    if re.fullmatch(r"[0-9]+", words):
        return Startpoint.specific(int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if re.fullmatch(r"[+-][0-9]+", words):
        return Startpoint.relative(records=int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if words.startswith("-") and DURATION.fullmatch(words[1:]):
        ms = -1000 * parse_duration_s(words[1:])
        return Startpoint.relative(ms=ms, out_of_range=out_of_range, reset_marks=reset_marks)
    try:
        ms = parse_time_ms(words.removeprefix("@"))
    except ValueError:
        raise ValueError(
            f"{text!r} is no place: give earliest, latest, bootstrap, an offset, an ISO 8601 time, "
            "-1h (so long before now) or -1000 (so many records back)"
        ) from None
    return Startpoint.timestamp(ms, out_of_range=out_of_range, reset_marks=reset_marks)


def say_place(startpoint: Startpoint) -> str:
    """A startpoint as people read it."""
    value, until = startpoint.value, startpoint.replace_until
    match startpoint.kind:
        case Kind.SPECIFIC_OFFSET:
            return f"offset {value}" if until is None else f"offset {value}, rows below {until} are replaced"
        case Kind.TIMESTAMP:
            return say_time(value or 0)
        case Kind.RELATIVE_RECORDS:
            return f"{value:+} records"
        case Kind.RELATIVE_MS:
            return f"{(value or 0) / 1000:g} s"
        case _:
            return str(startpoint.kind).lower()
