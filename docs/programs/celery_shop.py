# Celery: celery -A shop worker
import os
from contextlib import ExitStack

import sqlalchemy as sa
from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown
from sqlalchemy import orm

import txnbridge
from txnbridge import Topic, codecs
from txnbridge.sql import Outbox

engine = sa.create_engine(os.environ["DATABASE_URL"])
orders = Topic("orders", codecs.json)


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    item: orm.Mapped[str] = orm.mapped_column(sa.String(100))


outbox = Outbox("shop", Base.metadata)

app = Celery("shop", broker=os.environ["CELERY_BROKER_URL"])
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, task_ignore_result=True)

in_this_process = ExitStack()


@worker_process_init.connect
def open_bridge(**_: object) -> None:
    engine.dispose(close=False)  # the parent's connections are not this process's
    bridge = in_this_process.enter_context(txnbridge.connect(timeout=3))
    in_this_process.enter_context(bridge.relay(outbox, engine))


@worker_process_shutdown.connect
def close_bridge(**_: object) -> None:
    in_this_process.close()


@app.task
def take_order(number: int, item: str) -> None:
    with orm.Session(engine) as session, session.begin():
        if session.get(Order, number) is not None:
            return  # an earlier run has stored both
        session.add(Order(id=number, item=item))
        outbox.send(session, orders, {"id": number, "item": item}, key=str(number))
