"""Which calls a node refused, and with which code: counted as answers go out, read by whoever shows it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Struct

Refused = tuple[str, ErrorCode]
"""The request's name, and the code."""
_PARTS = ("results", "logs")


class CountedAnswers:
    """`answer` as the one that it was given, counting. Thread-safe."""

    def __init__(self, answer: Callable[[Struct, str], Struct]) -> None:
        self._answer = answer
        self._counts: Counter[Refused] = Counter()
        self._lock = threading.Lock()

    def answer(self, request: Struct, sender: str) -> Struct:
        """The answer; an error of it, or of a partition in it, is counted."""
        answer = self._answer(request, sender)
        refused = [code for code in _codes(answer) if code is not ErrorCode.NONE]
        if refused:
            name = type(request).__name__.removesuffix("Request")
            with self._lock:
                self._counts.update((name, code) for code in refused)
        return answer

    def read(self) -> Mapping[Refused, int]:
        """As it is now."""
        with self._lock:
            return dict(self._counts)


def _codes(answer: Struct) -> Iterator[ErrorCode]:
    yield getattr(answer, "error_code", ErrorCode.NONE)
    for name in _PARTS:
        for part in getattr(answer, name, ()):
            yield getattr(part, "error_code", ErrorCode.NONE)
