"""Records of the decision log: written and read back as they are, for ever, and nothing else is taken for one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txnbridge._base.timing import Timing
from txnbridge._base.token import Decision
from txnbridge._decisions import records
from txnbridge.errors import InvalidOption

GOLDEN = Path(__file__).parent / "golden"

UNDER = records.OpeningRef(("billing",), "b7e1", 3)
BATCH = ("query", "sink", 7, 0)
BEGIN = records.EvidenceBegin((12, 3), "n2")
RANGES = records.AckRange("g", ("orders", 0), (100,), (180,)), records.AckRange("g", ("orders", 7), (1, 2), (1, 3))


def opened(data: Mapping[str, Any]) -> records.Opened:
    return records.Opened(log="a1", nonce="n4", under=UNDER, named=False, host="h pid 1", data=data)


def claimed(nonce: str, id: tuple[Any, ...], decision: Decision = Decision.COMMIT, **fields: Any) -> records.Claimed:
    fields = {"begin": None, "by": UNDER, "stored": None, **fields}
    return records.Claimed(log="a1", nonce=nonce, id=id, decision=decision, **fields)


EXAMPLES: dict[str, records.LogRecord] = {
    "birth": records.Birth(log="a1", nonce="n1", at=1_700_000_000_000),
    "presence": records.Presence(log="a1", nonce="n2", until=1_700_000_900_000),
    "presence of a process that does not know the log": records.Presence(log=None, nonce="n3", until=1),
    "opened": opened({"writers": 4}),
    "entry": records.EntryRecord(log="a1", nonce="n5", under=UNDER, about="prepare", transaction="t1", data={"pid": 9}),
    "claim by a token": claimed("n6", ("t1",), begin=BEGIN, by=None, body={}),
    "claim of a run": claimed("n7", BATCH, Decision.ABORT, body={"tokens": ["é"]}),
    "claim with parts": claimed("n8", BATCH, body=None, stored=records.StoredBody(((4,), (6,)), "d1")),
    "claim that acknowledges": claimed("n12", ("t1",), begin=BEGIN, acked=records.ClaimAcks((39,), RANGES), body={}),
    "done": records.Done(log="a1", nonce="n9", id=("query", "sink"), up_to=7),
    "part": records.BodyPart(log="a1", nonce="n10", payload=b'{"half\n of it\x00\xff'),
    "snapshot": records.Snapshot(
        log="a1", nonce="n11", born=(0,), covers=(40,), digest="d2", at=5, body={"log": "a1"}, stored=None
    ),
    "renewed": records.Renewed(log="a2", nonce="n13", covers=(40,), digest="d2", at=5, host="h pid 1"),
}


def test_version_2_is_read_and_written_for_ever():
    texts = json.loads((GOLDEN / "decision-records-2.json").read_text())
    golden = {name: text.encode("latin-1") for name, text in texts.items()}
    assert {name: records.decode(raw) for name, raw in golden.items()} == EXAMPLES
    assert golden == {name: records.encode(record) for name, record in EXAMPLES.items()}


def test_every_kind_of_record_is_in_the_golden_file():
    assert {type(record) for record in EXAMPLES.values()} == set(records.LogRecord.__subclasses__())


@given(st.binary())
@example(b'{"txnbridge":1}')
@example(b'{"txnbridge":1,"kind":["birth"]}')
@example(b'{"txnbridge":true,"kind":"birth"}')
@example(b'{"txnbridge":1.0,"kind":"birth","log":"a","nonce":"b","at":1}')
@example(b'{"txnbridge":1,"kind":"birth","log":"a","nonce":"b","at":' + b"9" * 5000 + b"}")
@example(b'{"txnbridge":1,"kind":"done","log":"a","nonce":"b","id":["x"],"up_to":NaN}')
@example(b'{"txnbridge":1,"kind":"done","log":"a","nonce":"b","id":' + b"[" * 100_000)
def test_garbage_is_refused_and_nothing_else_happens(raw):
    with pytest.raises(records.UnreadableRecord):
        records.decode(raw)


@given(st.sampled_from(list(EXAMPLES.values())), st.data())
def test_a_changed_record_is_refused_or_is_another_whole_record(record, data):
    """A record that can be read after bytes were cut, put in or changed is complete, and can be written again."""
    raw = records.encode(record)
    at = data.draw(st.integers(0, len(raw)))
    until = data.draw(st.integers(at, min(len(raw), at + 12)))
    changed = raw[:at] + data.draw(st.binary(max_size=12)) + raw[until:]
    try:
        read = records.decode(changed)
    except records.UnreadableRecord:
        return
    assert records.decode(records.encode(read)) == read


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(list(EXAMPLES.values())), st.data())
def test_a_field_of_the_wrong_kind_is_refused(record, data):
    line, _, payload = records.encode(record).partition(b"\n")
    values = json.loads(line)
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(_JSON)
    try:
        read = records.decode(json.dumps(values).encode() + (b"\n" + payload if payload else b""))
    except records.UnreadableRecord:
        return
    assert records.decode(records.encode(read)) == read


def test_an_unknown_kind_or_a_further_field_is_refused():
    # Of the same version, so nobody knows what it means: to pass over it might be to pass over a claim.
    raw = records.encode(EXAMPLES["done"])
    for changed in (
        raw.replace(b'"done"', b'"undo"'),
        raw[:-1] + b',"more":1}',
        raw.replace(b'"up_to":7', b'"up_to":null'),
    ):
        with pytest.raises(records.UnreadableRecord):
            records.decode(changed)


def test_a_claim_that_cannot_acknowledge_anything_is_refused():
    raw = records.encode(EXAMPLES["claim that acknowledges"])
    for changed in (
        raw.replace(b'"commit"', b'"abort"'),
        raw.replace(b'{"at":[12,3],"id":"n2"}', b"null"),
        raw.replace(b'"ranges":[[', b'"ranges":[],"more":[['),
        raw.replace(b'["g","orders",0,[100],[180]]', b'["g","orders",0,[100]]'),
    ):
        assert changed != raw
        with pytest.raises(records.UnreadableRecord):
            records.decode(changed)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": object()}, "JSON"),
        ({"x": float("nan")}, "JSON"),
        ({"x": b"bytes"}, "JSON"),
        ({"x": "y" * records.MAX_RECORD_BYTES}, "900000"),
    ],
    ids=["object", "nan", "bytes", "too large"],
)
def test_data_that_no_record_can_hold_is_the_callers_mistake(data, said):
    with pytest.raises(InvalidOption, match=said):
        records.encode(opened(data))


def test_a_whole_part_fits_into_a_record():
    part = records.BodyPart(log="f" * 16, nonce="f" * 16 + "-" + "9" * 12, payload=b"\xff" * Timing().part_bytes)
    assert len(records.encode(part)) <= records.MAX_RECORD_BYTES
