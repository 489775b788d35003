"""A web service with many worker processes: each takes a slot of one directory, and so has an outbox of its own.

    OUTBOX=orders-outbox gunicorn --workers 4 worker_api:app          (uvicorn --workers, celery: docs/outbox.md)

    POST /orders/<number>         201 {"slot": "slot-2", "offset": 42}          it is on disk

The slot is taken by the first request, behind the fork: a worker that is killed leaves it to the one that replaces it.
"""

import os
import threading
from functools import lru_cache

from flask import Flask
from flask.typing import ResponseReturnValue

from pushrep import Outbox, OutboxConfig, PushrepError

app = Flask(__name__)
_opening = threading.Lock()


def outbox() -> Outbox:
    """This worker's own; opened once, in whichever of its threads comes first."""
    with _opening:
        return _opened(os.getpid())


@lru_cache
def _opened(_pid: int) -> Outbox:
    # More slots than workers: while one ends the next one has begun.
    return Outbox.open_slot(os.environ["OUTBOX"], "orders", 1, "web-shop", slots=16, config=OutboxConfig(linger_ms=1))


@app.post("/orders/<int:number>")
def order(number: int) -> ResponseReturnValue:
    try:
        mine = outbox()
        return {"slot": mine.directory.name, "offset": mine.append(0, b"%d" % number).result(timeout=30)}, 201
    except PushrepError as error:
        return {"error": str(error)}, 503
