"""Records on fence and proof topics can be read by the next version: this version wrote these texts."""

from dataclasses import replace

import pytest
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.outcome.proof import PRESENCE, PROOF, ProofRecord
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord, ProofLocation

from txnbridge import EvidenceLost

pytestmark = pytest.mark.offline

MARKER, INPUT, FIRST, FOURTH = (
    f"persistent://public/default/{name}"
    for name in ("_txnbridge-marker-billing.p0", "input-partition-1", "orders-partition-0", "orders-partition-3")
)
PROOF_LOCATION = ProofLocation(MARKER, (7, 8), "n0nce")
WHERE = ((MARKER, FIRST, FOURTH), ((INPUT, "shipping"),), PROOF_LOCATION)
ANNOUNCED = AnnouncedTransaction("billing/1/2", TxnId(0, 0), *WHERE, 0, 1_700_000_030_000, True, messages=3)
NOTICE = FenceRecord("0pening", "host pid 1", 1_700_000_000_000, (ANNOUNCED,), (), "l1neage", (TxnId(0, 8),))
GOLDEN = (
    b'{"v":1,"o":"0pening","h":"host pid 1","w":1700000000000,"u":[{"t":"billing/1/2","x":[0,0],'
    b'"p":{"persistent://public/default/_txnbridge-marker-billing.p0":[-1],'
    b'"persistent://public/default/orders":[0,3]},'
    b'"a":[["persistent://public/default/input-partition-1","shipping"]],'
    b'"k":{"m":"persistent://public/default/_txnbridge-marker-billing.p0","s":[7,8],"n":"n0nce"},'
    b'"i":0,"e":1700000030000,"d":true,"c":3}],"r":[],"l":"l1neage","k":[[0,8]]}'
)


def test_a_notice_is_written_and_read_as_ever() -> None:
    assert (NOTICE.pack(), FenceRecord.unpack(GOLDEN)) == (GOLDEN, NOTICE)


def test_the_position_of_a_proof_message_is_kept_where_it_is_known() -> None:
    at = replace(PROOF_LOCATION, at=(7, 9))
    assert at.fields() == {**PROOF_LOCATION.fields(), "p": [7, 9]}
    assert (ProofLocation.read(at.fields()), ProofLocation.read(PROOF_LOCATION.fields())) == (at, PROOF_LOCATION)


@pytest.mark.parametrize("data", [None, b"", b"{}", b"[]", b"1", GOLDEN.replace(b'"v":1', b'"v":2'), GOLDEN[:-9]])
def test_data_that_is_no_fence_record_proves_nothing(data: bytes | None) -> None:
    with pytest.raises(EvidenceLost):
        FenceRecord.unpack(data)


@pytest.mark.parametrize(
    ("record", "golden"),
    [
        (ProofRecord(PRESENCE, "n0nce", until=1_700_000_000_000), b'{"v":1,"k":"here","n":"n0nce","e":1700000000000}'),
        (
            ProofRecord(PRESENCE, "n0nce", "billing/1/2", 1_700_000_000_000, True),
            b'{"v":1,"k":"here","n":"n0nce","t":"billing/1/2","e":1700000000000,"o":true}',
        ),
        (ProofRecord(PROOF, transaction="billing/1/2"), b'{"v":1,"k":"mark","t":"billing/1/2"}'),
    ],
)
def test_a_record_on_a_marker_topic_is_written_and_read_as_ever(record: ProofRecord, golden: bytes) -> None:
    assert (record.pack(), ProofRecord.unpack(golden)) == (golden, record)


def test_a_record_that_is_not_ours_is_passed_over() -> None:
    assert [ProofRecord.unpack(data) for data in (None, b"", b"hello", b"[1]", b'{"v":2,"k":"mark"}')] == [None] * 5
