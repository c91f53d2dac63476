# Django: python shop.py runserver, and beside it: txnbridge relay run --database "$DATABASE_URL" --outbox shop
import os
import sys
from typing import Any

import django
import sqlalchemy as sa
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from txnbridge import Topic, codecs
from txnbridge.sql import Outbox

url = sa.make_url(os.environ["DATABASE_URL"])
backend = {"sqlite": "sqlite3"}.get(url.get_backend_name(), url.get_backend_name())
database = {"NAME": url.database, "USER": url.username, "PASSWORD": url.password, "HOST": url.host, "PORT": url.port}
settings.configure(
    DATABASES={"default": {"ENGINE": f"django.db.backends.{backend}"} | {k: v for k, v in database.items() if v}},
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["localhost", "testserver"],
)
django.setup()

orders = Topic("orders", codecs.json)
outbox = Outbox("shop")


class Order(models.Model):
    id = models.BigAutoField(primary_key=True)
    item = models.TextField(unique=True)

    class Meta:
        app_label = "shop"
        db_table = "orders"


class Borrowed:
    """Django's connection for SQLAlchemy, which may neither end its transaction nor close it."""

    def __init__(self) -> None:
        connection.ensure_connection()
        self._connection = connection.connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        pass

    rollback = close = commit


native = {"use_native_hstore": False} if backend == "postgresql" else {}  # it would need the driver's own class
joining = sa.create_engine(url, creator=Borrowed, poolclass=sa.NullPool, **native)


def send(topic: Topic, value: Any, **more: Any) -> None:
    """Add a message to the transaction of Django that is open."""
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError("a message is sent inside transaction.atomic()")
    with joining.connect() as borrowed:
        outbox.send(borrowed, topic, value, **more)


def order(request: HttpRequest, item: str) -> JsonResponse:
    with transaction.atomic():
        order = Order.objects.create(item=item)
        send(orders, {"id": order.id, "item": item}, key=item)
    return JsonResponse({"id": order.id})


urlpatterns = [path("orders/<item>", order)]


def create_tables() -> None:  # or migrations; the outbox's by RunPython
    outbox.create(sa.create_engine(url))
    with connection.schema_editor() as editor:
        editor.create_model(Order)


if __name__ == "__main__":
    execute_from_command_line(sys.argv)
