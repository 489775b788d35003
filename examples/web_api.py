"""A web service as a producer: an order is answered with 201 only when it can't be lost any more.

    pushrep replica serve copy-1 --listen 127.0.0.1:7401 --allow any        two nodes, in production on two machines
    pushrep replica serve copy-2 --listen 127.0.0.1:7402 --allow any
    python examples/web_api.py orders-outbox --replica 127.0.0.1:7401 --replica 127.0.0.1:7402

    POST /orders/<customer>   {"item": "book"}       201 {"partition": 1, "offset": 42}     m of the members have it
                                                     503  it was not taken, or may still be delivered: ask again later
    GET  /orders/<customer>                          200 [...]                              what is safe, newest last
    GET  /health                                     200 or 503                             whether orders are taken
    GET  /metrics                                    for Prometheus

The receipt is waited for in the thread that serves the request; requests that wait at the same time share one fdatasync
and one round to the replicas, so more threads are more throughput. One process: an Outbox has one writer, and refuses a
fork of it (for many worker processes: worker_api.py).
"""

import argparse
import json
import zlib
from pathlib import Path

from flask import Flask, Response, request
from flask.typing import ResponseReturnValue
from prometheus_client import CollectorRegistry, generate_latest
from waitress.server import create_server

from pushrep import Acks, Outbox, OutboxConfig, PushrepError
from pushrep.outbox import DeliveryFailed, NotEnoughReplicas
from pushrep.status.metrics import StatusCollector

TOPIC, PARTITIONS, PRODUCER = "orders", 3, "web-shop"


def make_app(outbox: Outbox, timeout_s: float) -> Flask:
    app = Flask(__name__)
    registry = CollectorRegistry()
    registry.register(StatusCollector(outbox.status))

    @app.post("/orders/<customer>")
    def order(customer: str) -> ResponseReturnValue:
        value = json.dumps({"customer": customer, "order": request.get_json()}).encode()
        partition = partition_of(customer)
        try:
            offset = outbox.append(partition, value).result(timeout=timeout_s)
        except NotEnoughReplicas as error:
            return {"error": str(error), "taken": "no"}, 503
        except DeliveryFailed as error:
            return {"error": str(error), "taken": "perhaps" if error.may_be_delivered else "no"}, 503
        except PushrepError as error:
            return {"error": str(error), "taken": "perhaps"}, 503
        return {"partition": partition, "offset": offset}, 201

    @app.get("/orders/<customer>")
    def orders(customer: str) -> ResponseReturnValue:
        log = outbox.log(partition_of(customer))
        found = (json.loads(record.value or b"null") for record in log.records(log.log_start_offset, log.stable_offset))
        return [one["order"] for one in found if one["customer"] == customer]

    @app.get("/health")
    def health() -> ResponseReturnValue:
        status = outbox.status()
        is_ready = status.state.value == "leading" and not status.under_min_insync
        return {"state": status.state.value, "in_sync": status.in_sync_min}, 200 if is_ready else 503

    @app.get("/metrics")
    def metrics() -> ResponseReturnValue:
        return Response(generate_latest(registry), content_type="text/plain; version=0.0.4")

    return app


def partition_of(customer: str) -> int:
    """One customer's orders stay in order."""
    return zlib.crc32(customer.encode()) % PARTITIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--replica", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=8080, help="0: the system chooses")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=10, help="so long an order waits for its answer")
    parser.add_argument("--replica-lag-max-ms", type=int, default=30_000, help="a replica that owes longer is away")
    options = parser.parse_args()
    with Outbox.open(
        options.directory,
        TOPIC,
        PARTITIONS,
        PRODUCER,
        replicas=options.replica,
        acks=Acks.ALL,
        config=OutboxConfig(linger_ms=1, replica_lag_max_ms=options.replica_lag_max_ms),
    ) as outbox:
        app = make_app(outbox, options.timeout_s)
        server = create_server(app, host="127.0.0.1", port=options.port, threads=options.threads)
        print(f"orders at http://127.0.0.1:{server.effective_port}/orders", flush=True)
        server.run()


if __name__ == "__main__":
    main()
