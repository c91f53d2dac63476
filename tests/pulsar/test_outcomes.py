"""Tests of outcomes: always the truth, from whatever process, whichever end was asked for first."""

from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_conformance.observing import send
from txnbridge_pulsar.client import PulsarClient, Single, TxnId
from txnbridge_pulsar.outcome import outcome
from txnbridge_pulsar.outcome.outcome import EndResult, coordinator_state
from txnbridge_pulsar.outcome.proof import PRESENCE, PROOF, ProofRecord, write_plain

from tests.failing import fail_call, note_calls
from tests.pulsar import writing_kit
from tests.pulsar.client_kit import SOON, admin, begin, path_of
from tests.pulsar.fake import Peer, fake_broker, owns_everything, replies
from txnbridge import Bridge, Outcome, Token, TokenState, errors
from txnbridge.spi import Deadline
from txnbridge.testing import next_commit


class Lost:
    """Ends the connection instead of answering."""


# What a coordinator answers to an end, one request after another, and what that came to.
NOT_FOUND, NOT_LOADED, STORE, NOT_ALLOWED, NO_RIGHTS = 24, 20, 2, 22, 4
ANSWERS: list[tuple[list[Any], Any]] = [
    ([None], EndResult.COMMITTED),
    ([NOT_FOUND], EndResult.BEFORE),
    # A store that was taken away may have the first request all the same, and the next coordinator carries it out.
    ([NOT_LOADED, NOT_FOUND], EndResult.UNCLEAR),
    ([STORE, NOT_FOUND], EndResult.UNCLEAR),
    ([Lost, NOT_FOUND], EndResult.UNCLEAR),
    ([NOT_LOADED, None], EndResult.COMMITTED),
    ([NOT_ALLOWED], errors.NotSupported),
    ([NO_RIGHTS], errors.AccessDenied),
    # A later "no" is not the answer to the first request.
    ([Lost, NO_RIGHTS], errors.OutcomeUnknown),
    ([Lost, NOT_ALLOWED], errors.OutcomeUnknown),
    ([STORE, NO_RIGHTS], errors.OutcomeUnknown),
]


@pytest.mark.parametrize(("answers", "expected"), ANSWERS, ids=str)
def test_the_result_of_an_end_is_certain_only_where_every_request_was_answered(answers: list[Any], expected: Any):
    waiting = list(answers)

    def end_txn(peer: Peer, fields: dict[str, Any]) -> None:
        answer = waiting.pop(0)
        if answer is Lost:
            peer.hang_up()
            return
        error = {} if answer is None else {"error": answer, "message": "?"}
        peer.say("end_txn_response", request_id=fields["request_id"], **error)

    connected_to = replies("tc_client_connect_response")
    with fake_broker(tc_client_connect_request=connected_to, end_txn=end_txn) as broker:
        with PulsarClient(broker.url) as client:
            owns_everything(broker)
            cluster: Any = SimpleNamespace(client=client)
            if isinstance(expected, EndResult):
                assert outcome.end(cluster, TxnId(0, 1), True, (), Deadline(SOON)) is expected
            else:
                with pytest.raises(expected):
                    outcome.end(cluster, TxnId(0, 1), True, (), Deadline(SOON))
    assert not waiting


@pytest.fixture
def bridge(open_bridge: writing_kit.Connect) -> Bridge:
    return open_bridge(writers=2)


@pytest.fixture
def topic(bridge: Bridge) -> str:
    return writing_kit.new_topic(bridge)


def unknown(bridge: Bridge, topic: str, value: bytes, happened: bool = True) -> str:
    """The token of a transaction whose answer was lost."""
    with next_commit(bridge, Outcome.UNKNOWN, happened=happened), pytest.raises(errors.OutcomeUnknown) as caught:
        send(bridge, topic, value)
    assert caught.value.token is not None
    return caught.value.token


def test_a_transaction_that_hides_the_marker_makes_the_outcome_unknown_until_it_ends(open_bridge, client):
    """A naive look takes the hidden marker for an abort, of what was committed."""
    bridge = open_bridge(writers=1, timeout=5)
    topic = writing_kit.new_topic(bridge)
    with bridge.transaction(timeout=30) as txn:
        txn.send(topic, b"1")
        writing_kit.flush(txn)
        marker = writing_kit.proof_topic_of(txn)
    hiding = begin(client, marker)
    producer = client.create_producer(marker, timeout=SOON, transactions=True)
    producer.send(Single(ProofRecord(PROOF).pack()), hiding, timeout=SOON).result(SOON)
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(errors.OutcomeUnknown) as caught:
        with bridge.transaction(timeout=30) as txn:
            txn.send(topic, b"2")
    token = str(caught.value.token)
    number, proof = writing_kit.evidence_of(token)
    assert coordinator_state(writing_kit.cluster_of(bridge), number, proof, Deadline(SOON)) == ""
    assert number not in [entry.txn for entry in client.read(marker, timeout=SOON).receive(1)]
    found = bridge.status(token)
    assert (found.state, found.permanent) == (TokenState.UNKNOWN, False)
    client.transactions.end(hiding, False, SOON)
    assert writing_kit.state_of(bridge, token) is TokenState.COMMITTED
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1", b"2"]


def test_a_presence_that_was_stored_late_is_not_taken_for_the_next_one(open_bridge: writing_kit.Connect) -> None:
    """A presence whose first try was not answered may be stored late: the transaction may be open behind it."""
    bridge = open_bridge(writers=1)
    topic = writing_kit.new_topic(bridge)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        writing_kit.flush(txn)
        marker = writing_kit.proof_topic_of(txn)
    write_plain(
        writing_kit.cluster_of(bridge), marker, ProofRecord(PRESENCE, "n0nce", until=1_700_000_000_000), Deadline(SOON)
    )
    tokens = [unknown(bridge, topic, b"x", happened) for happened in (True, False)]
    assert [writing_kit.state_of(bridge, token) for token in tokens] == [TokenState.COMMITTED, TokenState.ABORTED]


def test_records_of_an_older_owner_on_a_marker_topic_say_nothing_of_the_newer_one(open_bridge):
    """The older owner writes its presence before it learns that it is fenced: in front of what the newer owner
    commits later.
    """
    id = writing_kit.unique("owner")
    older = open_bridge(transactional_id=id)
    topic = writing_kit.new_topic(older)
    newer = open_bridge(transactional_id=id)
    send(newer, topic, b"1")
    with pytest.raises(errors.Fenced), older.transaction() as txn:
        txn.send(topic, b"zombie")
    token = Token.parse(unknown(newer, topic, b"2"))
    for how in (token.how, {name: value for name, value in token.how.items() if name != "p"}):  # as of earlier versions
        asked = str(Token("pulsar", newer.cluster, token.transaction, how, False))
        assert writing_kit.state_of(newer, asked) is TokenState.COMMITTED
    with newer.transaction() as txn:
        txn.send(topic, b"3")
        writing_kit.flush(txn)
        asked = str(writing_kit.token_of(txn, newer))
        txn.abort()
    assert writing_kit.state_of(newer, asked) is TokenState.ABORTED


@pytest.mark.parametrize("ask", ["end", "status"])
def test_a_marker_topic_that_no_broker_serves_yet_is_looked_at_again(monkeypatch, bridge, topic, ask):
    token = writing_kit.prepare(bridge, topic)
    assert bridge.commit(token) is Outcome.COMMITTED
    died = errors.DeadlineExceeded("its broker has died, and no other has it yet")
    fail_call(monkeypatch, outcome, "was_committed", died)
    looks = note_calls(monkeypatch, outcome, "was_committed")
    if ask == "end":
        assert bridge.abort(token) is Outcome.COMMITTED
    else:
        assert writing_kit.state_of(bridge, token) is TokenState.COMMITTED
    assert len(looks) == 2


def test_a_marker_topic_that_was_made_anew_proves_nothing(pulsar_broker, open_bridge, bridge, topic):
    token = writing_kit.prepare(bridge, topic)
    assert bridge.commit(token) is Outcome.COMMITTED
    admin(pulsar_broker, "DELETE", f"{path_of(writing_kit.evidence_of(token)[1].topic)}?force=true")
    found = bridge.status(token)
    assert (found.state, found.permanent) == (TokenState.UNKNOWN, True)
    later = writing_kit.prepare(bridge, topic)  # the slot is free, and its topic made anew
    with pytest.raises(errors.EvidenceLost):
        bridge.commit(token)
    assert bridge.abort(later) is Outcome.ABORTED


def test_an_open_transaction_is_neither_committed_nor_aborted(open_bridge, bridge, topic):
    with bridge.transaction() as txn:
        txn.send(topic, b"x")
        writing_kit.flush(txn)
        token = writing_kit.token_of(txn, bridge)
        found = open_bridge().status(token)
        assert (found.state, found.permanent) == (TokenState.UNKNOWN, False)
    assert writing_kit.state_of(bridge, str(token)) is TokenState.COMMITTED


def test_a_slot_is_used_again_when_its_transaction_has_ended(open_bridge: writing_kit.Connect, topic: str) -> None:
    bridge, other = open_bridge(transactional_id=writing_kit.unique("owner")), open_bridge()
    first, second = writing_kit.prepare(bridge, topic), writing_kit.prepare(bridge, topic)
    assert other.abort(first) is Outcome.ABORTED
    third = writing_kit.prepare(bridge, topic)
    markers = [writing_kit.evidence_of(token)[1].topic for token in (first, second, third)]
    assert markers[0] == markers[2] != markers[1]
    assert (writing_kit.state_of(other, first), writing_kit.state_of(other, third)) == (
        TokenState.ABORTED,
        TokenState.PREPARED,
    )
    for token in (second, third):
        assert other.abort(token) is Outcome.ABORTED


def test_a_damaged_how_is_refused(bridge: Bridge) -> None:
    for how in ({}, {"x": [0], "a": True}, {"x": [0, "1"], "a": True}, {"x": [0, 1], "a": True, "m": 1}):
        with pytest.raises(errors.InvalidToken):
            bridge.status(Token("pulsar", bridge.cluster, "a/b/1", how, True))
