r"""What is said on the control socket: JSON, one object a line, a question and its answer. Has never met a socket.

    ▶ {"version": 1, "call": "status", "arguments": {}}\n
    ◀ {"version": 1, "ok": {...}}\n
    ◀ {"version": 1, "error": "NotLeader", "why": "..."}\n       instead, where it is refused

Versions: a question names the one that it is written in. A server that does not know it refuses in its own version with
the error UnsupportedVersion. A line above its limit, or one that is no JSON object, ends the connection before more is
read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pushrep.outbox.control.errors import BadControlMessage, CallRefused

VERSION = 1
QUESTION_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 16 << 20
"""Some 50,000 partitions in one status; who wants more asks for a part of them."""
UNSUPPORTED_VERSION, UNKNOWN_CALL, TOO_LARGE = "UnsupportedVersion", "UnknownCall", "AnswerTooLarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A call by its name."""

    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


class Lines:
    """Bytes in, objects out. Raises BadControlMessage; it is of no use after that."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects that are whole with these bytes."""
        self._buffer += data
        found = []
        while (end := self._buffer.find(b"\n")) >= 0:
            if end > self._bytes_max:
                break
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            found.append(_object_in(line))
        if len(self._buffer) > self._bytes_max:
            raise BadControlMessage(f"a line is longer than {self._bytes_max} bytes")
        return found


def question_bytes(question: Question) -> bytes:
    """A question as it goes to the wire. Raises BadControlMessage if it is too long."""
    said = {"version": question.version, "call": question.call, "arguments": dict(question.arguments)}
    data = _line(said)
    if len(data) > QUESTION_BYTES_MAX:
        raise BadControlMessage(f"the question has {len(data)} bytes, {QUESTION_BYTES_MAX} at most")
    return data


def question_in(said: Mapping[str, Any]) -> Question:
    """The question in an object that came. Raises BadControlMessage; CallRefused for another version."""
    version, call, arguments = said.get("version"), said.get("call"), said.get("arguments", {})
    if isinstance(version, bool) or not isinstance(version, int):
        raise BadControlMessage("a question names its version, a number")
    if version != VERSION:
        raise CallRefused(UNSUPPORTED_VERSION, f"version {version} is not spoken here, but {VERSION}: use its pushrep")
    if not isinstance(call, str) or not isinstance(arguments, dict):
        raise BadControlMessage("a question has a `call`, a text, and `arguments`, an object")
    return Question(call=call, arguments=arguments)


def answer_bytes(value: Any) -> bytes:
    """A good answer as it goes to the wire; one that is too long is an error instead."""
    data = _line({"version": VERSION, "ok": value})
    if len(data) > ANSWER_BYTES_MAX:
        return refusal_bytes(TOO_LARGE, f"the answer has {len(data)} bytes, {ANSWER_BYTES_MAX} at most: ask for less")
    return data


def refusal_bytes(kind: str, why: str) -> bytes:
    """A bad answer."""
    return _line({"version": VERSION, "error": kind, "why": why})


def value_in(said: Mapping[str, Any]) -> Any:
    """What an answer brings. Raises CallRefused, BadControlMessage."""
    if "error" in said:
        raise CallRefused(str(said["error"]), str(said.get("why", "")))
    if said.get("version") != VERSION or "ok" not in said:
        raise BadControlMessage("what came is no answer")
    return said["ok"]


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _object_in(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadControlMessage(f"a line is no JSON: {type(error).__name__}") from error
    if not isinstance(said, dict):
        raise BadControlMessage(f"a line is no object, but {type(said).__name__}")
    return said
