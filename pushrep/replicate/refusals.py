"""Which calls a node refused, and with which code: counted as answers go out, read by whoever shows it."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Struct

Refused = tuple[str, ErrorCode]
"""The request's name, and the code."""


class CountedAnswers:
    """`answer` as the one that it was given, counting. Thread-safe."""

    def __init__(self, answer: Callable[[Struct, str], Struct]) -> None:
        self._answer = answer
        self._counts: Counter[Refused] = Counter()
        self._lock = threading.Lock()

    def answer(self, request: Struct, sender: str) -> Struct:
        """The answer; an error of it, or of a partition in it, is counted."""
        answer = self._answer(request, sender)
        if refused := _refused_by(answer):
            name = type(request).__name__.removesuffix("Request")
            with self._lock:
                self._counts.update((name, code) for code in refused)
        return answer

    def read(self) -> Mapping[Refused, int]:
        """As it is now."""
        with self._lock:
            return dict(self._counts)


def _refused_by(answer: Struct) -> list[ErrorCode]:
    parts = [answer, *getattr(answer, "results", ()), *getattr(answer, "logs", ())]
    return [code for part in parts if (code := getattr(part, "error_code", ErrorCode.NONE)) is not ErrorCode.NONE]
