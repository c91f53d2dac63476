# FastAPI: uvicorn shop:app
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, FastAPI, Response
from sqlalchemy import orm

import txnbridge
from txnbridge import Topic, codecs
from txnbridge.sql import Outbox

engine = sa.create_engine(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
BROKER = os.environ.get("TXNBRIDGE_URL", "embedded:broker.db")
orders = Topic("orders", codecs.json)


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    item: orm.Mapped[str] = orm.mapped_column(sa.String(100), unique=True)


outbox = Outbox("shop", Base.metadata)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    Base.metadata.create_all(engine)  # or Alembic
    with txnbridge.connect(BROKER) as bridge, bridge.relay(outbox, engine) as app.state.relay:
        yield


app = FastAPI(lifespan=lifespan)


def session() -> Iterator[orm.Session]:
    with orm.Session(engine) as session, session.begin():
        yield session


@app.post("/orders/{item}")
def order(item: str, session: Annotated[orm.Session, Depends(session, scope="function")]) -> int:
    order = Order(item=item)
    session.add(order)
    session.flush()  # the database gives the order its id
    outbox.send(session, orders, {"id": order.id, "item": item}, key=item)
    return order.id


@app.get("/health")
def health() -> Response:
    return Response(status_code=200 if app.state.relay.healthy else 503)
