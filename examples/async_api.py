"""An asyncio web service as a producer: an order is answered with 201 only when it is on disk.

    pip install fastapi uvicorn uvloop
    python examples/async_api.py orders-outbox --port 8080

    POST /orders/<customer>   {"item": "book"}       201 {"partition": 1, "offset": 42}     it survives a power cut
                                                     503  it was not taken, or may still be delivered: ask again later
    GET  /orders/<customer>                          200 [...]                              what is safe, newest last

Thousands of requests wait for the disk at the same time without a thread each; those that wait together share one
fdatasync. While the buffer is full, `append` suspends the requests, and the loop answers others. One process:
an Outbox has one writer; with `uvicorn --workers` each opens a slot by `AsyncOutbox.open_slot`.
"""

import argparse
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Request, Response

from pushrep import AsyncOutbox, OutboxConfig, PushrepError
from pushrep.outbox import DeliveryFailed, RecordRefused

TOPIC, PARTITIONS, PRODUCER = "orders", 3, "web-shop"


def make_app(directory: Path) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncOutbox.open(
            directory, TOPIC, PARTITIONS, PRODUCER, config=OutboxConfig(block_ms=5000)
        ) as outbox:
            app.state.outbox = outbox
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{customer}", status_code=201)
    async def order(
        customer: str,
        request: Request,
        response: Response,
        what: Annotated[dict[str, Any], Body()],
    ) -> dict[str, object]:
        outbox: AsyncOutbox = request.app.state.outbox
        partition = partition_of(customer)
        value = json.dumps({"customer": customer, "order": what}).encode()
        try:
            receipt = await outbox.append(partition, value)
        except RecordRefused as error:
            response.status_code = 422
            return {"error": str(error), "taken": "no"}
        except PushrepError as error:
            response.status_code = 503
            return {"error": str(error), "taken": "no"}
        try:
            return {"partition": partition, "offset": await receipt}
        except DeliveryFailed as error:
            response.status_code = 503
            return {"error": str(error), "taken": "perhaps" if error.may_be_delivered else "no"}

    @app.get("/orders/{customer}")
    def orders(customer: str, request: Request) -> list[Any]:  # not async: FastAPI reads the disk in a thread
        log = request.app.state.outbox.outbox.log(partition_of(customer))
        found = (json.loads(record.value or b"null") for record in log.records(log.log_start_offset, log.stable_offset))
        return [one["order"] for one in found if one["customer"] == customer]

    return app


def partition_of(customer: str) -> int:
    """One customer's orders stay in order."""
    return zlib.crc32(customer.encode()) % PARTITIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    options = parser.parse_args()
    uvicorn.run(make_app(options.directory), host="127.0.0.1", port=options.port, loop=options.loop, log_level="info")


if __name__ == "__main__":
    main()
