"""Tests of messages that a live broker drops by age, and whose outcome is known to nobody afterwards."""

import time

import pytest
from txnbridge_conformance.observing import eventually
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, fields, nothing
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.write import half_buffer
from txnbridge_rocketmq.write.writer import RocketMQWriter

from tests.failing import EACH, fail_call
from tests.rocketmq.kit import BROKER, LONG, becomes_true
from tests.rocketmq.reading_kit import connect_to, new_topic, publish, unique
from txnbridge import TokenState
from txnbridge.errors import EvidenceLost, OutcomeUnknown

_DELETE_EXPIRED = 329
_FILE_BYTES = 1 << 20


@pytest.fixture
def broker(start_rocketmq):
    """Start a broker that drops its older files when it is told to, but not in its first minute."""
    kept = {"mappedFileSizeCommitLog": str(_FILE_BYTES), "fileReservedTime": "0", "deleteWhen": "30"}
    return start_rocketmq(settings={**kept, "messageIndexSafe": "true"})


@pytest.mark.parametrize("log", ["in SQLite", pytest.param("on the same broker", marks=pytest.mark.full)])
def test_a_message_that_its_end_alone_has_published_is_not_aborted_when_retention_has_dropped_it(
    broker, with_timing, monkeypatch, tmp_path, log
):
    with_timing(clocks_differ=0.5, index_timeout=1.0)
    monkeypatch.setattr(half_buffer, "DIRECT_SLACK_SECONDS", 0.0)
    topic = unique("dropped")
    elsewhere = f"sqlite:///{tmp_path}/log.db" if log == "in SQLite" else None
    with connect_to(broker.url, application="keeper", decision_log=elsewhere) as bridge:
        with RemotingClient([broker.url.removeprefix("rocketmq://")]) as client:
            with bridge.transaction() as txn:  # only a broker that was seen to publish needs no decision
                txn.send(topic, b"before")
            with monkeypatch.context() as lost:
                publish_fresh = HalfEnder.publish_fresh
                lost.setattr(HalfEnder, "publish_fresh", lambda *args: publish_fresh(*args) and False)
                # The answer is lost for good, so that the bridge does not ask at once.
                fail_call(lost, RocketMQWriter, "_end_direct", EvidenceLost("the answer is lost"), EACH)
                with pytest.raises(OutcomeUnknown) as unknown, bridge.transaction(timeout=5) as txn:
                    txn.send(topic, b"seen")
            token = str(unknown.value.token)
            assert bridge.status(token).state is TokenState.COMMITTED
            publish(client, new_topic(client), *[b"x" * (_FILE_BYTES // 2)] * 6)
            expire = RpcRequest("dropping old files", _DELETE_EXPIRED, nothing, fields())
            client.call(BROKER, expire, LONG)
            look = read_requests.pull(topic, 0, 0, "looking")
            eventually(lambda: not client.call(BROKER, look, LONG).records, "retention has dropped the message")
            assert becomes_true(lambda: bridge.status(token).state is not TokenState.COMMITTED)
            time.sleep(2)  # its deadline is past, on every host
            status = bridge.status(token)
            assert (status.state, status.permanent) == (TokenState.UNKNOWN, True)
