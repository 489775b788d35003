"""Who may read the console, decided from a request's headers before a page runs. No sockets, no clock.

    Host            the host of `--listen`, and loopback names and addresses; off loopback every address
    Authorization   with a password each request has to carry it, HTTP Basic with any name

The console makes the password: 128 random bits, which nobody guesses, so that no slow hash is needed.
"""

import binascii
import hmac
import os
import secrets
from base64 import b64decode
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from pushrep.errors import BadArgument
from pushrep.replicate.sockets import Address

_PASSWORD_BYTES = 16
_CHARACTERS_MIN = len(secrets.token_urlsafe(_PASSWORD_BYTES))


class Admission(Enum):
    """What a request's headers say."""

    ALLOWED = auto()
    OTHER_HOST = auto()
    NO_PASSWORD = auto()
    WRONG_PASSWORD = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleAccess:
    """The rule. listen: the console's address. password: None for a console on loopback that needs none."""

    listen: Address
    password: str | None = field(default=None, repr=False)

    def check(self, host: str, authorization: str) -> Admission:
        """host, authorization: the headers' values, empty if the request lacks them."""
        if not self.listen.is_own_host(host):
            return Admission.OTHER_HOST
        if self.password is None:
            return Admission.ALLOWED
        if not authorization:
            return Admission.NO_PASSWORD
        is_right = hmac.compare_digest(_password_of(authorization), self.password.encode())
        return Admission.ALLOWED if is_right else Admission.WRONG_PASSWORD


def kept_password(file: Path) -> tuple[str, bool]:
    """The password in a file, and whether it was made now: if there is no file, one is made that only its owner reads.

    Raises BadArgument if the file can't be read or made, or holds something shorter than such a password.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(file), False
    except OSError as error:
        raise BadArgument("password_file", f"{file} can't be made: {error.strerror or error}") from error
    password = secrets.token_urlsafe(_PASSWORD_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{password}\n")
    return password, True


def _read(file: Path) -> str:
    try:
        password = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise BadArgument("password_file", f"{file} can't be read: {error}") from error
    if len(password) < _CHARACTERS_MIN:
        why = f"{file} holds fewer than {_CHARACTERS_MIN} characters: delete it, and the console makes a password"
        raise BadArgument("password_file", why)
    return password


def _password_of(authorization: str) -> bytes:
    """The password of HTTP Basic (RFC 7617); empty for any other header."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
