"""A web service whose orders and events are one transaction, with a relay as its thread.

    pip install fastapi uvicorn                        and pushrep with its extras tables and sql
    python examples/orders_sql.py shop --port 8080                                     SQLite, in shop/
    python examples/orders_sql.py shop --dsn postgresql://shop@127.0.0.1/shop

    POST /orders/<customer>   201 {"id": 7}   the order is in the database, and its event will be in the outbox
    GET  /orders              200 {"orders": 7, "events": 7}

Killed between the commit and the relay, the event's row is in the database, and the next start relays it.
"""

import argparse
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pushrep import Outbox
from pushrep.tables import OutboxTable, TableRelay

PARTITIONS = 4


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


@dataclass(frozen=True)
class OrderPlaced:
    order: int
    customer: str


outbox = OutboxTable(Base.metadata)
orders = outbox.topic("orders", OrderPlaced, partitions=PARTITIONS, key=lambda event: event.customer)


def make_app(directory: Path, dsn: str) -> FastAPI:
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        Base.metadata.create_all(engine)
        with (
            Outbox.open(directory / "outbox", "orders", PARTITIONS, "orders", carrier="header") as target,
            TableRelay(target, dsn, table=outbox),
        ):
            app.state.target = target
            yield
        engine.dispose()

    app = FastAPI(lifespan=lifespan)

    def new_session() -> Iterator[Session]:
        with Session(engine) as session:
            yield session

    @app.post("/orders/{customer}", status_code=201)
    def place(customer: str, session: Annotated[Session, Depends(new_session)]) -> dict[str, int]:
        with session.begin():
            order = Order(customer=customer)
            session.add(order)
            session.flush()
            orders.add(session, OrderPlaced(order.id, customer))
            return {"id": order.id}

    @app.get("/orders")
    def counts(session: Annotated[Session, Depends(new_session)]) -> dict[str, int]:
        events = sum(app.state.target.log(n).log_end_offset for n in range(PARTITIONS))
        return {"orders": session.scalar(select(func.count()).select_from(Order)) or 0, "events": events}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Orders and their events in one transaction.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dsn", help="of the database.  [default: SQLite, in DIRECTORY]")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    dsn = given.dsn or f"sqlite:///{given.directory / 'shop.db'}"
    uvicorn.run(make_app(given.directory, dsn), host="127.0.0.1", port=given.port, access_log=False)


if __name__ == "__main__":
    main()
