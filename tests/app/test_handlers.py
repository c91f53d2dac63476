"""Tests of the arguments that a handler's function gets, and of the values that it returns."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, List  # noqa: UP035

import pydantic
import pytest
import sqlalchemy as sa

from tests.in_time import wait_until
from txnbridge import App, Message, Outgoing, Processor, Router, Topic, Transaction, codecs, errors
from txnbridge._process.processor import HandlerSettings
from txnbridge.sql import Outbox


@dataclass
class Order:
    id: int
    note: str | None = None


@dataclass
class Line:
    day: date


@dataclass
class Sheet:
    lines: list[Line]


class Model(pydantic.BaseModel):
    id: int


def send(bridge, *values: bytes | None, key: bytes | None = None) -> None:
    with bridge.transaction() as txn:
        for value in values:
            txn.send("in", value, key=key)


def sent(bridge, topic="out") -> list[tuple[Any, Any]]:
    return [(message.key, message.value) for message in bridge.read(topic, 100)]


def run(function, inputs="in", **settings) -> None:
    app = App()
    app.process(inputs, group="g", **settings)(function)
    app.run(until_idle=True)


def take_anything(value) -> None: ...
def take_bytes(value: bytes) -> None: ...
def take_any_json(value) -> None: ...
def take_text(value: str) -> None: ...
def take_dict(value: dict[str, Any]) -> None: ...
def take_dataclass(value: Order) -> None: ...
def take_list(value: list[Order]) -> None: ...
def take_optional(value: Order | None) -> None: ...
def take_none(value: Order | None) -> None: ...
def take_nested(value: Sheet) -> None: ...
def take_model(value: Model) -> None: ...
def take_message(value: Message[Order]) -> None: ...
def take_any_message(value: Message) -> None: ...
def take_by_name(message) -> None: ...


TAKEN = [
    (take_anything, b"1", b"1"),
    (take_bytes, b"1", b"1"),
    (take_text, b"\xc3\xa9", "é"),
    (take_dict, b'{"a": 1}', {"a": 1}),
    (take_dataclass, b'{"id": 1}', Order(1)),
    (take_list, b'[{"id": 1}]', [Order(1)]),
    (take_optional, b'{"id": 1, "note": "x"}', Order(1, "x")),
    (take_none, None, None),
    (take_nested, b'{"lines": [{"day": "2030-01-02"}]}', Sheet([Line(date(2030, 1, 2))])),
    (take_model, b'{"id": 1}', Model(id=1)),
    (take_message, b'{"id": 1}', Order(1)),
    (take_any_message, b'{"id": 1}', b'{"id": 1}'),
    (take_by_name, b'{"id": 1}', b'{"id": 1}'),
]


def test_the_type_of_the_first_parameter_decodes_the_value(bridge):
    app = App()
    seen: dict[str, list[Any]] = {}
    for function, data, _ in TAKEN:
        topic = function.__name__
        with bridge.transaction() as txn:
            txn.send(topic, data, key=b"k")
        app.process(topic, group="g")(recording(function, seen.setdefault(topic, [])))
    with app:
        wait_until(lambda: all(seen.values()))
    for function, _, value in TAKEN:
        (got,) = seen[function.__name__]
        if "message" in str(inspect.signature(function)).lower():
            assert (got.topic, got.key) == (function.__name__, b"k")
            got = got.value
        assert (function.__name__, got) == (function.__name__, value)


def recording(function, seen: list[Any]):
    """Return a function with the signature of another one, which keeps its argument."""

    def record(value):
        seen.append(value)

    record.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return record


def test_json_is_decoded_by_the_type_of_the_function(bridge):
    def ship(order: Order) -> str:
        return f"{type(order).__name__} {order.id}"

    send(bridge, b'{"id": 1}')
    run(ship, Topic("in", codecs.json), to="out")
    assert sent(bridge) == [(None, b"Order 1")]


def test_a_topic_with_a_codec_keeps_it(bridge):
    def ship(order: Order) -> dict[str, int]:
        return {"id": order["id"]}  # type: ignore[index]

    send(bridge, b'{"id": 1}')
    mapping = codecs.pydantic(dict[str, int])
    run(ship, Topic("in", mapping), to=Topic("out", mapping))
    assert sent(bridge) == [(None, b'{"id":1}')]


def test_a_value_that_does_not_fit_and_a_tombstone_are_poison(bridge):
    misfits = {
        b"no json": "cannot be decoded: DecodeError",
        b'{"other": 1}': "cannot be decoded: Object missing required field `id`",
        b'{"id": "1"}': "cannot be decoded: Expected `int`, got `str` - at `$.id`",
        b'{"id": 1, "note": "\\ud800"}': "cannot be decoded: DecodeError",
        None: "a tombstone, which record does not take (its value would be None)",
    }
    send(bridge, *misfits, b'{"id": 1, "unknown": 2}')
    seen: list[Any] = []
    run(recording(take_dataclass, seen), dead_letter="dead")
    assert seen[-1] == Order(1)
    assert {m.value: m.headers["txnbridge-dead-reason"] for m in bridge.read("dead", 9)} == misfits


@pytest.mark.parametrize(
    ("function", "value", "reason"),
    [
        (take_dict, b"5", "Expected `object`, got `int`"),
        (take_list, b'[{"id": {}}]', "Expected `int`, got `object` - at `$[0].id`"),
        (take_nested, b'{"lines": [{"day": 1}]}', "Expected `date`, got `int` - at `$.lines[0].day`"),
        (take_model, b'{"id": "secret"}', "invalid: id"),
        (take_any_json, b'{"price": 1e400}', "ValueError"),
        (take_any_json, b"NaN", "ValueError"),
        (take_any_json, b'["\\ud800"]', "UnicodeEncodeError"),
    ],
)
def test_types_mean_what_they_say_and_the_reason_names_the_field(bridge, function, value, reason):
    send(bridge, value)
    inputs = Topic("in", codecs.json) if function is take_any_json else "in"
    run(recording(function, []), inputs, dead_letter="dead")
    [dead] = bridge.read("dead", 2)
    assert dead.headers["txnbridge-dead-reason"] == f"cannot be decoded: {reason}"


def test_further_parameters_are_passed_by_name_or_type(bridge):
    seen = []

    def by_name(value, txn, message, limit=3):
        seen.append((value, type(txn), message.key, limit))

    async def by_type(value: bytes, *, a: Transaction, b: Message[bytes]) -> None:
        seen.append((value, type(a), b.key, 3))

    send(bridge, b"1", key=b"k")
    app = App()
    app.process("in", group="a")(by_name)
    app.process("in", group="b")(by_type)
    app.run(until_idle=True)
    assert seen == [(b"1", Transaction, b"k", 3)] * 2


@pytest.mark.parametrize("ask", ["name", "type"])
def test_with_a_database_its_connection_is_passed_and_results_go_through_the_outbox(bridge, tmp_path, ask):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox = Outbox("shop")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE booked (value TEXT)"))

    def book(value: str, db) -> str:
        db.execute(sa.text("INSERT INTO booked VALUES (:value)"), {"value": value})
        return value

    def book_by_type(value: str, connection: sa.Connection) -> str:
        return book(value, connection)

    send(bridge, b"1", b"2", key=b"k")
    run(book if ask == "name" else book_by_type, to="out", db=engine, outbox=outbox)
    with bridge.relay(outbox, engine) as relay:
        while relay.lag != 0 or len(sent(bridge)) < 2:
            pass
    with engine.begin() as connection:
        assert [row.value for row in connection.execute(sa.text("SELECT value FROM booked"))] == ["1", "2"]
    assert sent(bridge) == [(b"k", b"1"), (b"k", b"2")]
    engine.dispose()


def one(value: bytes) -> bytes:
    return value


def text(value: str) -> str:
    return value


def dataclass_or_model(value: bytes) -> list[Order | Model]:
    return [Order(1), Model(id=2)]


def several(value: bytes) -> list[bytes]:
    return [value, value + b"b"]


def yielded(value: bytes) -> Iterator[bytes | None]:
    yield from (value, None, value + b"b")


async def later(value: bytes) -> bytes:
    return value


async def yielded_later(value: bytes) -> AsyncIterator[bytes]:
    yield value
    yield value + b"b"


def nothing(value: bytes) -> bytes | None:
    return None


def elsewhere(value: bytes) -> list[bytes | Outgoing]:
    return [value, Outgoing("out", Order(7), key="other", headers={"h": "1"}), Outgoing("out", None, key="gone")]


RETURNED: list[tuple[Callable[..., Any], list[tuple[bytes, bytes | None]]]] = [
    (one, [(b"k", b"1")]),
    (text, [(b"k", b"1")]),
    (dataclass_or_model, [(b"k", b'{"id":1,"note":null}'), (b"k", b'{"id":2}')]),
    (several, [(b"k", b"1"), (b"k", b"1b")]),
    (yielded, [(b"k", b"1"), (b"k", b"1b")]),
    (later, [(b"k", b"1")]),
    (yielded_later, [(b"k", b"1"), (b"k", b"1b")]),
    (nothing, []),
    (elsewhere, [(b"k", b"1")]),
]


def test_the_value_that_a_function_returns_is_sent_with_the_key_of_its_message(bridge):
    app = App()
    for function, _ in RETURNED:
        bridge.ensure_topics(function.__name__)
        app.process("in", group=function.__name__, to=function.__name__)(function)
    send(bridge, b"1", key=b"k")
    with app:
        wait_until(lambda: all(counts.messages for counts in app.stats.values()))
    for function, expected in RETURNED:
        assert (function.__name__, sent(bridge, function.__name__)) == (function.__name__, expected)
    assert sent(bridge) == [(b"other", b'{"id":7,"note":null}'), (b"gone", None)]


def test_a_key_is_encoded_for_the_topic_that_it_goes_to(bridge):
    send(bridge, b"1", key=b"7")
    run(one, Topic("in", key=codecs.json), to="out")
    send(bridge, b"2", key=b"7")
    app = App()
    app.process(Topic("in", key=codecs.json), group="g", to=Topic("out", key=codecs.json))(one)
    app.run(until_idle=True)
    assert sent(bridge) == [(b"7", b"1"), (b"7", b"2")]


def test_an_attempt_that_fails_behind_its_first_result_sends_nothing(bridge):
    attempts = []

    def fail_once(value: bytes) -> Iterator[bytes]:
        yield value
        attempts.append(value)
        if len(attempts) == 1:
            raise ValueError

    send(bridge, b"1")
    run(fail_once, to="out", backoff=(0.01, 0.01))
    assert attempts == [b"1", b"1"]
    assert sent(bridge) == [(None, b"1")]


def test_a_function_that_fails_gets_its_message_again_later(bridge):
    attempts = []

    def fail_once(order: Order) -> str:
        attempts.append(order)
        if len(attempts) == 1:
            raise ValueError
        app.stop()
        return "done"

    send(bridge, b'{"id": 1}', key=b"7")
    app = App()
    app.process("in", group="g", to="out", retry=[0.2])(fail_once)
    app.run()
    assert attempts == [Order(1), Order(1)]
    assert sent(bridge) == [(b"7", b"done")]


@pytest.mark.parametrize(
    ("result", "to", "sentence"),
    [
        (b"1", None, "surprise returned bytes, but has no topic"),
        (("out", b"1"), "out", "surprise returned a tuple"),
        (asyncio.Event().wait, "out", "surprise returned an awaitable"),
    ],
)
def test_a_result_that_fits_nowhere_stops_the_app(bridge, result, to, sentence):
    later = []

    class Shop:
        def surprise(self, value: Order):
            later.append(result() if callable(result) else result)
            return later[-1]

    send(bridge, b'{"id": 1}')
    with pytest.raises(errors.InvalidOption, match=sentence):
        run(Shop().surprise, to=to)
    if callable(result):
        later[-1].close()


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (3.5, "surprise returned float: the value for out cannot be encoded: out takes bytes, str, dict"),
        ({"secret": {1}}, "surprise returned dict: .* type set is not JSON serializable"),
        ({"item": "\ud800"}, "surprise returned dict: "),
        (Outgoing("out", object()), "surprise returned object: "),
        (Outgoing("out", b"1", key=7), "surprise returned bytes: "),
        (Outgoing("out", b"1", headers={"n": 7}), "surprise returned bytes: "),
        (Outgoing("", b"1"), "surprise returned bytes: a topic's name must be"),
        (Outgoing("out", bytes(17 << 20)), "a message for out has 17825792 bytes"),
    ],
    ids=range(8),
)
def test_a_result_that_cannot_be_sent_is_a_failure_of_its_message(bridge, result, reason):
    def surprise(value: Order):
        return result if value.id == 1 else str(value.id)

    send(bridge, b'{"id": 0}', b'{"id": 1}', b'{"id": 2}')
    run(surprise, to="out", max_attempts=2, dead_letter="dead", backoff=(0.01, 0.01))
    assert [value for _, value in sent(bridge)] == [b"0", b"2"]
    [dead] = bridge.read("dead", limit=2)
    assert re.match("InvalidOption: " + reason, dead.headers["txnbridge-dead-reason"])


def test_the_log_names_the_line_of_an_asynchronous_function_that_fails(bridge, caplog):
    async def fail(value):
        raise ValueError("secret")

    send(bridge, b"1")
    with caplog.at_level(logging.WARNING), pytest.raises(errors.Poison) as raised:
        run(fail, max_attempts=2, backoff=(0.01, 0.01))
    assert "ValueError at " + __file__ in caplog.text and "ValueError at " + __file__ in str(raised.value)
    assert "secret" not in caplog.text + str(raised.value)


def takes_nothing(): ...
def takes_only_txn(txn): ...
def takes_any_number(*values): ...
def takes_unknown(value, customer): ...
def takes_txns(value, *txn): ...
def takes_missing(value: Missing): ...  # type: ignore[name-defined]  # noqa: F821
def takes_number(value: int): ...
def takes_db(value, db): ...
def takes_txn(value, txn): ...
def returns_order(value) -> Order: ...  # type: ignore[empty-body]
def returns_orders(value) -> Iterator[Order | None]: ...  # type: ignore[empty-body]
def returns_number(value) -> int: ...  # type: ignore[empty-body]
def returns_none(value) -> None: ...


@pytest.mark.parametrize(
    ("function", "settings", "sentence"),
    [
        (takes_nothing, {}, "takes_nothing has no parameter for the value"),
        (takes_any_number, {}, "takes_any_number has no parameter for the value"),
        (takes_only_txn, {}, "the first parameter of takes_only_txn is for the message's value, not for txn"),
        (takes_unknown, {}, "an unknown parameter 'customer'"),
        (takes_txns, {}, "an unknown parameter '*txn'"),
        (takes_missing, {}, "the type 'Missing' is not found"),
        (takes_number, {}, "takes_number takes int: without a codec"),
        (takes_db, {}, "takes_db asks for db: give process"),
        (takes_txn, {"db": "sqlite://"}, "takes_txn asks for txn, but with db="),
        (returns_order, {}, "returns_order returns a value, but has no topic for it"),
        (returns_orders, {}, "returns_orders returns a value, but has no topic for it"),
        (returns_number, {"to": "out"}, "returns_number returns int: without a codec"),
        (returns_none, {"to": "out"}, "has a topic to='out', but returns None"),
        (returns_order, {"to": "out", "db": "sqlite://"}, "is sent through an outbox"),
        (one, {"to": "out", "dead_leter": "x"}, "process() has no dead_leter=; did you mean dead_letter=?"),
        (one, {"to": "out", "stop_timeout": 3}, "process() has no stop_timeout="),
        (one, {"to": "out", "group": ""}, "@app.process needs group="),
        (len, {}, "process() decorates a function"),
        (take_anything, {"inputs": ["other", "in"]}, "before and take_anything both read 'in' in group 'g'"),
    ],
)
def test_a_function_that_cannot_work_is_refused_where_it_is_decorated(function, settings, sentence):
    app = App()

    @app.process("in", group="g")
    def before(value): ...

    if function is not take_anything:
        settings = {"group": "h", **settings}
    with pytest.raises(errors.InvalidOption) as raised:
        app.process(**{"inputs": "in", "group": "g", **settings})(function)
    assert sentence in str(raised.value)
    assert [handler.function for handler, _ in app._collect()] == [before]


def test_a_router_with_the_topic_and_group_of_another_function_is_not_included():
    app, router = App(), Router()
    app.process("in", group="g")(take_text)
    router.process("in", group="g")(take_bytes)
    with pytest.raises(errors.InvalidOption, match="take_text and take_bytes both read"):
        app.include(router)
    outer = Router()
    outer.include(router)
    with pytest.raises(errors.InvalidOption, match="cannot include itself"):
        router.include(outer)
    app.process("in", group="other")(take_bytes)


def test_a_function_with_retries_has_a_group_of_its_own():
    app = App()
    app.process("in", group="g")(take_bytes)
    with pytest.raises(errors.InvalidOption, match="take_bytes and take_text are both in group 'g'"):
        app.process("other", group="g", retry=[10])(take_text)
    app.process("other", group="h", retry=[10])(take_text)
    with pytest.raises(errors.InvalidOption, match="take_text and take_bytes are both in group 'h'"):
        app.process("third", group="h")(take_bytes)


@pytest.mark.parametrize(
    ("inputs", "settings", "sentence"),
    [
        ("missing", {}, ""),
        ("in", {"to": "missing"}, "one sends to 'missing': "),
        ("in", {"dead_letter": "missing"}, "the dead letters of group 'h' go to 'missing': "),
    ],
)
def test_a_topic_that_is_missing_is_told_at_the_start(bridge, inputs, settings, sentence):
    app, router = App(create_topics=0), Router()
    app.process("in", group="g")(take_bytes)
    router.process(inputs, group="h", **{"to": "out", **settings})(one)
    app.include(router)
    with pytest.raises(errors.NotFound) as raised, app:
        pass
    assert (
        str(raised.value) == f"{sentence}there is no topic 'missing'; create it with: txnbridge topics create missing"
    )


def test_an_app_without_functions_is_told_at_the_start(url):
    with pytest.raises(errors.InvalidOption, match="no functions"), App():
        pass


def test_every_setting_of_a_processor_can_be_given():
    of_the_app = {"self", "consumers", "begin", "inputs", "group", "each", "batch", "stop_timeout"}
    taken = inspect.signature(Processor.__init__).parameters.keys() - of_the_app
    assert HandlerSettings.__optional_keys__ == taken


def test_a_batch_function_gets_the_messages_of_a_poll_and_all_or_none_of_them_take_effect(bridge):
    app, calls = App(), []

    @app.process("in", group="g", to="out", batch=True, dead_letter="dead")
    def count(orders: list[Order]) -> list[dict[str, int]]:
        calls.append([order.id for order in orders])
        if len(calls) == 1:
            raise ConnectionError("the first call fails")
        return [{"orders": len(orders)}, {"sum": sum(order.id for order in orders)}]

    send(bridge, b'{"id": 1}', b"no order", b'{"id": 3}', key=b"k")
    app.run(until_idle=True)
    assert calls == [[1, 3], [1, 3]]
    assert sent(bridge) == [(None, b'{"orders":2}'), (None, b'{"sum":4}')]
    assert [message.value for message in bridge.read("dead", 10)] == [b"no order"]


def test_an_asynchronous_batch_function_may_ask_for_whole_messages_and_the_transaction(bridge):
    app = App()

    @app.process("in", group="g", batch=True)
    async def copy(orders: list[Message[Order]], txn: Transaction) -> None:
        for order in orders:
            txn.send("out", str(order.value.id).encode(), key=order.key)

    send(bridge, b'{"id": 1}', b'{"id": 2}', key=b"k")
    app.run(until_idle=True)
    assert sent(bridge) == [(b"k", b"1"), (b"k", b"2")]


def test_a_batch_function_that_takes_no_list_or_one_message_is_refused():
    app = App()

    def one(order: Order) -> None: ...
    def bare(orders: List) -> None: ...  # type: ignore[type-arg]  # noqa: UP006

    def both(orders: list[Order], message: Message) -> None: ...

    refused = "is a list, such as list"
    for function, sentence in ((one, refused), (bare, refused), (both, "with batch=True it gets many")):
        with pytest.raises(errors.InvalidOption, match=sentence):
            app.process("in", group="g", batch=True)(function)


@pytest.mark.parametrize("batch", [False, True])
def test_middleware_is_around_each_call_and_what_it_raises_is_the_functions_failure(bridge, batch):
    app, steps = App(), []

    @contextmanager
    def around(given: Any) -> Iterator[None]:
        steps.append("begin")
        if steps == ["begin"]:
            raise ConnectionError("tried again")
        try:
            yield
        except ValueError as error:
            raise errors.Poison("no number") from error
        steps.append("end")

    def number(value: Any) -> None:
        int(value[0] if batch else value)

    number.__annotations__["value"] = list[bytes] if batch else bytes
    app.process("in", group="g", batch=batch, middleware=around, dead_letter="dead", max_messages=1)(number)
    send(bridge, b"1", b"x")
    app.run(until_idle=True)
    assert steps == ["begin", "begin", "end", "begin"]
    assert [message.value for message in bridge.read("dead", 10)] == [b"x"]
