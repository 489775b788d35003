"""Asking the process that has an outbox open."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pushrep.outbox.control.errors import BadControlMessage, NobodyAnswers
from pushrep.outbox.control.place import SOCKET_NAME, connect
from pushrep.outbox.control.protocol import ANSWER_BYTES_MAX, Lines, Question, question_bytes, value_in

TIMEOUT_S = 60.0
_READ_BYTES = 64 << 10


def ask(directory: Path, call: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """What the outbox in `directory` answers, a value of JSON.

    timeout_s: for connecting, and for each part of the answer. Raises NobodyAnswers, CallRefused, BadControlMessage.
    """
    try:
        with connect(directory, timeout_s) as connection:
            connection.sendall(question_bytes(Question(call=call, arguments=arguments or {})))
            return value_in(_first_line(connection))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NobodyAnswers(directory, "no process has it open") from error
    except PermissionError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME} is another user's") from error
    except TimeoutError as error:
        raise NobodyAnswers(directory, f"no answer within {timeout_s} s") from error
    except OSError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME}: {error.strerror or error}") from error


def _first_line(connection: socket.socket) -> dict[str, Any]:
    lines = Lines(ANSWER_BYTES_MAX)
    while data := connection.recv(_READ_BYTES):
        if found := lines.feed(data):
            return found[0]
    raise BadControlMessage("it was closed before an answer came")
