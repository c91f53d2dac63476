"""Opening an id: what it fences, what it ends, what it spares, and what is still known of what it destroyed."""

import os

import pytest
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import eventually, seen, send, values
from txnbridge_conformance.plugin import Connect

import txnbridge
from tests.kafka.kit import flush, writer_of
from txnbridge import Bridge, DeadlineExceeded, Fenced, NotFound, Outcome, OutcomeUnknown, TokenState
from txnbridge.testing import next_commit


def prepare(bridge: Bridge, topic: str, value: bytes = b"prepared") -> str:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, value)
    return str(txn.token)


def open_with_one_writer(url: str, owner: str) -> None:
    txnbridge.connect(url, transactional_id=owner, writers=1).close()


def test_a_death_while_opening_an_id_leaves_no_older_transaction_unfenced(run, txnbridge_url, connect, topic, owner):
    older = connect(transactional_id=owner, writers=3)
    left = [older.transaction() for _ in range(3)]
    for txn in left:
        txn.send_many(topic, [b"left open" * 2_000] * 100)
        flush(txn)
    # It has said that the id is its own, and fenced nobody yet.
    run(open_with_one_writer, txnbridge_url, owner, kill="decision.append/after").stopped()
    newer = connect(transactional_id=owner, writers=1)
    for txn in left:
        with pytest.raises(Fenced):
            txn.commit()
    assert values(seen(newer, topic)) == []


def test_a_fenced_owner_is_told_which_process_took_its_id(run, txnbridge_url, connect, topic, owner):
    older = connect(transactional_id=owner)
    taker = run(programs.own_and_commit, txnbridge_url, topic, owner, b"taken over")
    pid = taker.pid
    assert taker.result() == "committed"
    with pytest.raises(Fenced) as caught:
        send(older, topic, b"zombie")
    assert str(caught.value.newer).endswith(f"pid {pid}")


def told_of_owners(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.name == "txnbridge"]
    return [text for text in texts if "an older owner" in text]


def test_opening_an_id_whose_owner_is_in_a_transaction_logs_that_owner(connect, topic, owner, caplog):
    older = connect(transactional_id=owner, writers=2)
    with pytest.raises(Fenced), older.transaction() as txn:
        txn.send(topic, b"never")
        flush(txn)
        connect(transactional_id=owner, writers=2)
    (told,) = told_of_owners(caplog)
    assert writer_of(txn).id in told and f"pid {os.getpid()}" in told


def test_opening_an_id_whose_owner_is_in_no_transaction_logs_no_owner(connect, topic, owner, caplog):
    """The owner may be alive or long gone: a broker knows only owners that are in a transaction."""
    send(connect(transactional_id=owner), topic, b"0")
    connect(transactional_id=owner)
    assert told_of_owners(caplog) == []


@pytest.mark.parametrize("happened", [True, False], ids=["committed", "aborted"])
def test_an_outcome_that_was_not_heard_is_known_after_the_id_was_opened_by_another(connect, topic, owner, happened):
    older = connect(transactional_id=owner, application="shop", writers=1)
    send(older, topic, b"0")
    with next_commit(older, Outcome.UNKNOWN, happened=happened), pytest.raises(OutcomeUnknown) as caught:
        send(older, topic, b"1")
    token = str(caught.value.token)
    newer = connect(transactional_id=owner, application="shop", writers=1)
    for number in range(2):
        send(newer, topic, b"later %d" % number)
    wanted = TokenState.COMMITTED if happened else TokenState.ABORTED
    assert newer.status(token).state is wanted
    assert connect(application="shop").status(token).state is wanted


def test_a_prepared_transaction_has_an_outcome_after_its_id_was_used_again(connect: Connect, topic: str, owner: str):
    bridge = connect(transactional_id=owner, kafka={"prepared_ids": 2})
    tokens = [prepare(bridge, topic, b"%d" % number) for number in range(2)]
    outcomes = [bridge.commit(tokens[0]), bridge.abort(tokens[1])]
    for number in range(4):
        assert bridge.commit(prepare(bridge, topic, b"again %d" % number)) is Outcome.COMMITTED
    assert outcomes == [Outcome.COMMITTED, Outcome.ABORTED]
    other = connect()
    assert [other.status(token).state for token in tokens] == [TokenState.COMMITTED, TokenState.ABORTED]
    assert [other.commit(tokens[0]), other.abort(tokens[0])] == [Outcome.COMMITTED] * 2
    assert [other.commit(tokens[1]), other.abort(tokens[1])] == [Outcome.ABORTED] * 2


def test_when_all_ids_are_unresolved_the_next_waits_and_is_told_of_the_oldest(connect: Connect, topic: str, owner: str):
    bridge = connect(transactional_id=owner, kafka={"prepared_ids": 2})
    tokens = [prepare(bridge, topic, b"%d" % number) for number in range(2)]
    with pytest.raises(DeadlineExceeded, match="have unresolved ones") as caught:
        bridge.transaction(prepare=True, timeout=1.5)
    assert tokens[0] in str(caught.value)
    bridge.commit(tokens.pop(0))
    tokens.append(prepare(bridge, topic, b"2"))
    with pytest.raises(DeadlineExceeded) as caught:
        bridge.transaction(prepare=True, timeout=1.5)
    assert tokens[0] in str(caught.value)
    for token in tokens:
        bridge.commit(token)
    assert sorted(m.value for m in seen(bridge, topic)) == [b"0", b"1", b"2"]


def test_an_id_with_a_prepared_transaction_is_not_opened_by_the_next_owner(connect: Connect, topic: str, owner: str):
    token = prepare(connect(transactional_id=owner, kafka={"prepared_ids": 3}), topic)
    newer = connect(transactional_id=owner, kafka={"prepared_ids": 3})
    for number in range(4):
        newer.commit(prepare(newer, topic, b"%d" % number))
    assert newer.status(token).state is TokenState.PREPARED
    assert newer.commit(token) is Outcome.COMMITTED
    assert sorted(m.value for m in seen(newer, topic)) == [b"0", b"1", b"2", b"3", b"prepared"]


def test_a_bridge_without_an_id_leaves_no_trace_in_the_log_until_it_prepares(connect: Connect, topic: str, unique):
    application = unique("application")
    bridge = connect(application=application)
    send(bridge, topic, b"1")
    log = f"_txnbridge-log-{application}"
    assert log not in [found.name for found in bridge.admin.topics(internal=True)]
    bridge.abort(prepare(bridge, topic))
    eventually(lambda: log in [found.name for found in bridge.admin.topics(internal=True)], "the log is there")


def test_a_writer_that_opens_its_id_anew_asks_only_for_topics_that_it_uses_and_creates_no_deleted_one(
    connect: Connect, topic: str, owner: str
) -> None:
    gone = f"{topic}-gone"
    bridge = connect(transactional_id=owner, writers=1, create_topics=1)
    send(bridge, gone, b"0")
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown):
        send(bridge, topic, b"1")
    bridge.admin.delete_topic(gone)
    send(bridge, topic, b"2")
    with pytest.raises(NotFound, match=f"there is no topic '{gone}'"):
        send(bridge, gone, b"3")
    send(bridge, topic, b"4")
    assert values(seen(bridge, topic)) == [b"1", b"2", b"4"]
    assert gone not in [each.name for each in bridge.admin.topics()]
