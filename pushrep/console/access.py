"""Authentication of users and form tokens of the console, checked before a page runs. No sockets.

    on loopback          no login is needed; a request is refused unless its Host header is a loopback name or address
    with passwords       /login begins a session with a cookie; it ends after 12 hours, or when the console is restarted
    each POST            must come from this console's pages: Origin, Sec-Fetch-Site and the session's token are checked

The password file has a line NAME:scrypt$N$r$p$salt$hash for each user; salt and hash are in base64. A check uses 32 MiB
of memory. One password is checked at a time, with a pause of 1 s after a wrong one: at most 86,400 guesses a day.
"""

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from pushrep.errors import BadArgument
from pushrep.replicate.sockets import Address

SESSION_S = 12 * 3600
_WRONG_S = 1.0
_N, _R, _P, _SALT_BYTES = 1 << 15, 8, 1, 16
_MEMORY_BYTES = 64 << 20


def hashed(password: str) -> str:
    """The salted hash of a password, as in the password file."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return "$".join(("scrypt", str(_N), str(_R), str(_P), _text(salt), _text(_scrypt(password, salt, _N, _R, _P))))


def read_passwords(file: Path) -> dict[str, str]:
    """The password file as {name: hash}. Raises BadArgument if it can't be read or a line is invalid."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadArgument("passwords", f"{file} can't be read: {error}") from error
    return dict(_entries(file, lines))


class ConsoleAccess:
    """Checks requests, and keeps the sessions of users. Thread-safe.

    passwords: hashes by name; None: no login, for a console on loopback. pause: called after a wrong password, before
    the next password can be checked.
    """

    def __init__(
        self,
        passwords: Mapping[str, str] | None = None,
        *,
        is_tls: bool = False,
        pause: Callable[[], object] = partial(time.sleep, _WRONG_S),  # noqa: B008 - it is called for a wrong password
    ) -> None:
        self._passwords, self._pause = passwords, pause
        self.is_tls, self.cookie = is_tls, "__Host-pushrep" if is_tls else "pushrep"
        self._secret = secrets.token_bytes(32)
        self._users: dict[str, tuple[str, float]] = {}
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self._stranger = "" if passwords is None else hashed(secrets.token_hex())

    @property
    def wants_login(self) -> bool:
        """Whether pages need a login."""
        return self._passwords is not None

    def is_ours(self, request: Request) -> bool:
        """Whether the request's Host header is allowed. Without logins it must be a loopback name or address, because
        another site's name may resolve to this address (DNS rebinding). With logins every name is allowed.
        """
        return self.wants_login or Address((request.url.hostname or "").strip("[]"), 1).is_loopback

    def session(self, request: Request) -> str:
        """The session id in the request's cookie; without one, a new id, which is not logged in."""
        return request.cookies.get(self.cookie) or secrets.token_urlsafe(32)

    def user(self, session: str) -> str | None:
        """The session's user; None if the session is not logged in or has ended, and without logins."""
        name, until_s = self._users.get(session, (None, 0.0))
        return name if time.monotonic() < until_s else None

    def token(self, session: str) -> str:
        """The token that each form of this session has to contain."""
        return hmac.new(self._secret, session.encode(), "sha256").hexdigest()

    def check_form(self, request: Request, session: str, token: object) -> None:
        """Raise HTTPException if the form was not sent by a page of this console in this session."""
        origin = request.headers.get("origin", "")
        is_own_site = request.headers.get("sec-fetch-site", "same-origin") in {"same-origin", "none"}
        is_own_page = origin in {"", f"{request.url.scheme}://{request.url.netloc}"}
        if not (is_own_site and is_own_page and hmac.compare_digest(str(token).encode(), self.token(session).encode())):
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "This form comes from another site, or its session has ended: load the page again.",
            )

    def login(self, name: str, password: str) -> str | None:
        """The id of a new session; None for a wrong name or password. Both take equally long.

        One password is checked at a time, so that guessing is slow, and takes no memory and threads from users that are
        logged in. Raises HTTPException (429) while another password is checked.
        """
        if not self._checking.acquire(blocking=False):
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, "Another login is being checked: try again in a second.")
        try:
            kept = (self._passwords or {}).get(name, self._stranger)
            if not _fits(password, kept) or kept is self._stranger:
                self._pause()
                return None
        finally:
            self._checking.release()
        now, session = time.monotonic(), secrets.token_urlsafe(32)
        with self._lock:
            self._users = {one: found for one, found in self._users.items() if found[1] > now}
            self._users[session] = (name, now + SESSION_S)
        return session

    def logout(self, session: str) -> None:
        """End the session."""
        with self._lock:
            self._users.pop(session, None)


def _entries(file: Path, lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        name, colon, kept = line.strip().partition(":")
        if not name and not colon:
            continue
        try:
            _fits("", kept)
        except ValueError:
            why = f"{file}, line {number} is not NAME:scrypt$...: make one with pushrep console --new-password NAME"
            raise BadArgument("passwords", why) from None
        yield name, kept


def _fits(password: str, kept: str) -> bool:
    """Whether the password has this hash. Raises ValueError if `kept` is not a result of `hashed`."""
    kind, n, r, p, salt, wanted = kept.split("$")
    if kind != "scrypt":
        raise ValueError(kind)
    found = _scrypt(password, base64.b64decode(salt, validate=True), int(n), int(r), int(p))
    return hmac.compare_digest(found, base64.b64decode(wanted, validate=True))


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_MEMORY_BYTES, dklen=32)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
