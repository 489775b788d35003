"""The project's settings."""

import os
from urllib.parse import parse_qs, urlsplit

_DSN = urlsplit(os.environ["DSN"])
_POSTGRESQL = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": _DSN.path.lstrip("/"),
    "USER": _DSN.username,
    "HOST": _DSN.hostname or parse_qs(_DSN.query).get("host", [""])[0],
    "PORT": _DSN.port or parse_qs(_DSN.query).get("port", [""])[0],
}
_SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": _DSN.path.removeprefix("/")}
DATABASES = {"default": _SQLITE if _DSN.scheme == "sqlite" else _POSTGRESQL}
INSTALLED_APPS = ["pushrep.django", "shop"]
SECRET_KEY = "of a test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
