"""Who may use which page, decided before the page runs. Passwords, sessions, tokens of forms; no sockets.

    on loopback          no login; a Host header that is no name of this machine is refused
    with passwords       a session by cookie, begun at /login; 12 hours, or until the console is started again
    POST, anywhere       from our own page: Origin and Sec-Fetch-Site say so, and the form has the session's token

Passwords: a line each, NAME:scrypt$N$r$p$salt$hash, both in base64. Memory for one check: 32 MiB. They are checked
one at a time, with a pause of a second after a wrong one: 86,400 guesses a day.
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
    """What the file keeps of a password."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return "$".join(("scrypt", str(_N), str(_R), str(_P), _text(salt), _text(_scrypt(password, salt, _N, _R, _P))))


def read_passwords(file: Path) -> dict[str, str]:
    """By name. Raises BadArgument for a file that can't be read, or a line that is none of ours."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadArgument("passwords", f"{file} can't be read: {error}") from error
    return dict(_entries(file, lines))


class ConsoleAccess:
    """Sessions and their rights. Thread-safe.

    passwords: by name; None on loopback, without login. pause: the time after a wrong one before the next is
    checked.
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
        """Whether the Host header is a name of this machine: another site's name may resolve to this address, too."""
        return self.wants_login or Address((request.url.hostname or "").strip("[]"), 1).is_loopback

    def session(self, request: Request) -> str:
        """The request's session; a new one without login if it has none."""
        return request.cookies.get(self.cookie) or secrets.token_urlsafe(32)

    def user(self, session: str) -> str | None:
        """The session's user; None before a login, or without logins."""
        name, until_s = self._users.get(session, (None, 0.0))
        return name if time.monotonic() < until_s else None

    def token(self, session: str) -> str:
        """The token that a form of this session has to hold."""
        return hmac.new(self._secret, session.encode(), "sha256").hexdigest()

    def check_form(self, request: Request, session: str, token: object) -> None:
        """Raise HTTPException for a form that no page of ours sent in this session."""
        origin = request.headers.get("origin", "")
        is_own_site = request.headers.get("sec-fetch-site", "same-origin") in {"same-origin", "none"}
        is_own_page = origin in {"", f"{request.url.scheme}://{request.url.netloc}"}
        if not (is_own_site and is_own_page and hmac.compare_digest(str(token).encode(), self.token(session).encode())):
            raise HTTPException(HTTPStatus.FORBIDDEN, "This form is another site's, or old: load the page again.")

    def login(self, name: str, password: str) -> str | None:
        """A new session; None for a wrong name or password, which take as long as right ones.

        One at a time, so that guessing is slow and does not use the memory and threads of logged-in users: raises
        HTTPException while another one is checked.
        """
        if not self._checking.acquire(blocking=False):
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, "Another password is being checked: try again.")
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
        """Log the session out."""
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
            why = f"{file}, line {number}: it is no NAME:scrypt$...; make one with pushrep console --new-password NAME"
            raise BadArgument("passwords", why) from None
        yield name, kept


def _fits(password: str, kept: str) -> bool:
    """Raises ValueError for what `hashed` does not give."""
    kind, n, r, p, salt, wanted = kept.split("$")
    if kind != "scrypt":
        raise ValueError(kind)
    found = _scrypt(password, base64.b64decode(salt, validate=True), int(n), int(r), int(p))
    return hmac.compare_digest(found, base64.b64decode(wanted, validate=True))


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_MEMORY_BYTES, dklen=32)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
