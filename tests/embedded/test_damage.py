"""A change by others in the file is reported as damage, in its place, and skips no message."""

import json
import random
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace

import pytest

import txnbridge
from txnbridge import InvalidToken, StorageFailed, TxnBridgeError
from txnbridge._base.token import Token

HEADERS = ['[["a"', "1", "[1]", '[["a",1]]', '{"a":"b"}', '[["a","\\u0100"]]', "[" * 100_000, "null", "\x00"]


@pytest.mark.parametrize("sharing", [None, "partition", "message"])
@pytest.mark.parametrize("headers", HEADERS, ids=range(len(HEADERS)))
def test_damaged_headers_are_told_behind_all_that_is_sound_and_by_the_doctor(path, headers, sharing):
    with txnbridge.connect(f"embedded:{path}", create_topics=1) as bridge:
        for number in range(5):
            with bridge.transaction() as txn:
                txn.send("orders", b"%d" % number, headers={"h": "1"})
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE messages SET headers = ? WHERE value = ?", (headers, b"3"))
        consumer = bridge.consumer("orders", sharing and "g", sharing=sharing or "partition")
        if sharing != "message":
            assert [m.value for m in consumer.poll(10, 0)] == [b"0", b"1", b"2"]
        for _ in range(2):
            with pytest.raises(StorageFailed, match="headers of a message are damaged"):
                consumer.poll(10, 0)
        if sharing != "message":
            consumer.seek({("orders", 0): (4,)})
            assert [m.value for m in consumer.poll(10, 0)] == [b"4"]
        assert [advice.text for advice in bridge.admin.doctor() if advice.level == "problem"] == [
            "the headers of the message at 3 of the partition with id 1 are damaged"
        ]


def test_a_token_with_whatever_fields_is_answered_or_refused_with_an_error_of_ours(path):
    chosen = random.Random(1)
    values = [None, 0, -1, 1, 1 << 62, 1 << 63, 1 << 70, 1.5, True, "", "x", "\ud800", [], [1], {}, {"w": 1}]
    with txnbridge.connect(f"embedded:{path}", timeout=5) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send("orders", b"1")
        good = txn.token
        assert good is not None
        fields = {"b": good.broker, "c": good.cluster, "t": good.transaction, "h": {"p": 1}, "p": True, "n": 1}
        for _ in range(3000):
            changed = {**fields, chosen.choice("tphenfl"): chosen.choice(values)}
            if isinstance(changed["h"], dict):
                changed["h"] = {key: chosen.choice(values) for key in chosen.sample("pwnx", chosen.randint(0, 3))}
            with suppress(TxnBridgeError):
                (bridge.abort if chosen.random() < 1 / 3 else bridge.status)(_text(changed))
        with pytest.raises(InvalidToken, match="damaged"):
            bridge.status(replace(good, how={"w": ["x"], "n": 1}))


def _text(fields: dict[str, object]) -> str:
    import base64
    import zlib

    packed = json.dumps(fields).encode()
    raw = zlib.crc32(packed).to_bytes(4, "big") + packed
    return Token.__str__(Token("embedded", "", "", {}, True))[:5] + base64.urlsafe_b64encode(raw).decode().rstrip("=")
