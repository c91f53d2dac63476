"""Marker topics are cleared up: what nobody can need is dropped, and nothing that tells how a transaction ended."""

import time

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually
from txnbridge_pulsar.admin import cleanup
from txnbridge_pulsar.client import PulsarClient
from txnbridge_pulsar.settings import Timing

from tests.pulsar import writing_kit
from tests.pulsar.client_kit import SOON, admin, path_of
from txnbridge import Bridge, NotFound, Outcome, TokenState
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell

# When what was begun by now has been over for long: a presence's time, the longest transaction, and the hour behind.
LATER = (Timing().presence_seconds + 900 + Timing().token_valid_seconds + 60) * 1000
# And shortly before that.
NOT_YET = (900 + Timing().token_valid_seconds - 60) * 1000
# What a bridge begins with this timing was over before the hour that has just passed.
LONG_AGO = {"presence_seconds": -LATER / 1000, "transactions_per_presence": 1}


def clean_up(bridge: Bridge, topic: str, later_ms: float = 0) -> None:
    cleanup.clean_up(writing_kit.cluster_of(bridge), topic, time.time() * 1000 + later_ms, Deadline(SOON))


def proof_of(token: str) -> str:
    return writing_kit.evidence_of(token)[1].topic


def is_there(bridge: Bridge, topic: str) -> bool:
    return bool(writing_kit.cluster_of(bridge).topics.existing(topic, Deadline(SOON)))


def kept_from(broker: brokers.Pulsar, topic: str) -> tuple[int, int]:
    """Return the first position that the broker may not drop."""
    found = admin(broker, "GET", f"{path_of(topic)}/internalStats")["cursors"]["txnbridge"]["markDeletePosition"]
    ledger, _, entry = found.partition(":")
    return int(ledger), int(entry) + 1


def commit(bridge: Bridge, topic: str, value: bytes) -> str:
    with bridge.transaction() as txn:
        txn.send(topic, value)
        writing_kit.flush(txn)
        token = writing_kit.token_of(txn, bridge)
    return str(token)


def prepare_commit_and_wait(url: str, admin_url: str, topic: str) -> None:
    bridge = writing_kit.connect_to(url, admin_url)
    tell([writing_kit.prepare(bridge, topic), commit(bridge, topic, b"plain")])
    time.sleep(600)  # it is killed long before


def test_the_proof_topic_of_a_dead_bridge_is_deleted_an_hour_after_its_last_deadline(
    pulsar_broker: brokers.Pulsar, open_bridge: writing_kit.Connect, client: PulsarClient
) -> None:
    bridge = open_bridge()
    topic = writing_kit.new_topic(bridge)
    with Child(prepare_commit_and_wait, pulsar_broker.url, pulsar_broker.admin_url, topic) as child:
        prepared, plain = child.told()
        child.kill()
    for later in (0, NOT_YET):
        for token in (prepared, plain):
            clean_up(bridge, proof_of(token), later)
    clean_up(bridge, proof_of(prepared), LATER)  # as if the coordinator had stood still all the time
    assert (writing_kit.state_of(bridge, prepared), writing_kit.state_of(bridge, plain)) == (
        TokenState.PREPARED,
        TokenState.COMMITTED,
    )
    assert bridge.commit(prepared) is Outcome.COMMITTED
    for token in (prepared, plain):
        wait_until_cleared(bridge, token)
        found = bridge.status(token)
        assert (found.state, found.permanent) == (TokenState.UNKNOWN, True)
        assert "was deleted" in found.reason
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"prepared", b"plain"]


def wait_until_cleared(bridge: Bridge, token: str) -> None:
    """Wait until the proof topic is deleted: as soon as the broker has noticed that its writer has gone."""

    def is_gone() -> bool:
        if is_there(bridge, proof_of(token)):
            clean_up(bridge, proof_of(token), LATER)
        return not is_there(bridge, proof_of(token))

    eventually(is_gone, "the proof topic is deleted")


def test_a_living_bridge_keeps_its_marker_topic_however_long_it_has_nothing_to_write(open_bridge, client):
    bridge, other = open_bridge(), open_bridge()
    topic = writing_kit.new_topic(bridge)
    token = commit(bridge, topic, b"1")
    clean_up(other, proof_of(token), LATER)
    assert writing_kit.state_of(other, token) is TokenState.COMMITTED
    assert writing_kit.state_of(other, commit(bridge, topic, b"2")) is TokenState.COMMITTED
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1", b"2"]


def test_a_bridge_whose_marker_topic_was_cleared_up_writes_on_with_evidence(pulsar_broker, open_bridge, client):
    bridge, other = open_bridge(), open_bridge()
    topic = writing_kit.new_topic(bridge)
    first = writing_kit.prepare(bridge, topic, b"1")
    assert bridge.commit(first) is Outcome.COMMITTED
    marker = proof_of(first)
    wait_until_cleared(other, first)
    second = writing_kit.prepare(bridge, topic, b"2")
    assert proof_of(second) == marker
    assert kept_from(pulsar_broker, marker)  # so it has its subscription again
    assert bridge.commit(second) is other.commit(second) is Outcome.COMMITTED
    assert writing_kit.read_all(client, writing_kit.concrete(topic)) == [b"1", b"2"]


def test_a_cleanup_does_not_create_a_missing_topic(open_bridge: writing_kit.Connect) -> None:
    bridge = open_bridge()
    topic = f"persistent://public/default/{writing_kit.unique('missing')}"
    with pytest.raises(NotFound):
        clean_up(bridge, topic)
    assert not is_there(bridge, topic)


def test_cleanup_drops_the_records_of_an_id_that_no_living_token_needs_and_no_others(
    pulsar_broker: brokers.Pulsar, open_bridge: writing_kit.Connect, with_timing: writing_kit.WithTiming
) -> None:
    id = writing_kit.unique("owner")
    with with_timing(**LONG_AGO), open_bridge(transactional_id=id) as bridge:
        topic = writing_kit.new_topic(bridge)
        long_ago = [commit(bridge, topic, b"%d" % number) for number in range(3)]
    bridge = open_bridge(transactional_id=id)
    young = commit(bridge, topic, b"young")
    marker = proof_of(young)
    clean_up(bridge, marker)
    (_, since), (_, last) = writing_kit.evidence_of(young), writing_kit.evidence_of(long_ago[-1])
    assert last.since < kept_from(pulsar_broker, marker) <= since.since
    assert writing_kit.state_of(bridge, young) is TokenState.COMMITTED
    clean_up(bridge, marker, LATER)  # an id may be opened again: its newest record stays
    assert kept_from(pulsar_broker, marker) <= since.since
    assert writing_kit.state_of(bridge, young) is TokenState.COMMITTED


def test_a_cleanup_keeps_the_records_that_the_slot_of_an_unresolved_transaction_needs(pulsar_broker, open_bridge):
    bridge = open_bridge(transactional_id=writing_kit.unique("owner"), pulsar={"prepared_ids": 1})
    topic = writing_kit.new_topic(bridge)
    ended = [writing_kit.prepare(bridge, topic)]
    assert bridge.abort(ended[0]) is Outcome.ABORTED
    ended.append(writing_kit.prepare(bridge, topic))
    assert bridge.commit(ended[1]) is Outcome.COMMITTED
    unresolved = writing_kit.prepare(bridge, topic)
    clean_up(bridge, proof_of(unresolved), LATER)
    _, proof = writing_kit.evidence_of(unresolved)
    assert kept_from(pulsar_broker, proof.topic) <= proof.since
    assert writing_kit.state_of(bridge, unresolved) is TokenState.PREPARED
    assert bridge.commit(unresolved) is bridge.abort(unresolved) is Outcome.COMMITTED


def test_a_writer_says_anew_until_when_its_transactions_can_be_open(open_bridge, with_timing):
    bridge = open_bridge()
    topic = writing_kit.new_topic(bridge)
    first, second = (writing_kit.evidence_of(commit(bridge, topic, value))[1] for value in (b"1", b"2"))
    assert first == second
    with with_timing(presence_seconds=0.0):
        hasty = open_bridge()
    third, fourth = (commit(hasty, topic, value) for value in (b"3", b"4"))
    assert writing_kit.evidence_of(third)[1] != writing_kit.evidence_of(fourth)[1]
    assert writing_kit.state_of(hasty, third) is writing_kit.state_of(hasty, fourth) is TokenState.COMMITTED


def test_an_opening_bridge_cleans_up_after_dead_ones(pulsar_broker, open_bridge, with_timing):
    namespace = writing_kit.unique("clear")  # of its own: here all is over at once
    admin(pulsar_broker, "PUT", f"namespaces/public/{namespace}")
    url = pulsar_broker.url.replace("/default", f"/{namespace}")
    bridge = open_bridge(url)
    topic = writing_kit.new_topic(bridge)
    with Child(prepare_commit_and_wait, url, pulsar_broker.admin_url, topic) as child:
        prepared, plain = child.told()
        child.kill()
    at_once = {"first_cleanup_seconds": 0.0, "cleanup_every_seconds": 0.2}
    with with_timing(**at_once, token_valid_seconds=-(Timing().presence_seconds + 900)):
        open_bridge(url, transactional_id=writing_kit.unique("owner"))
    eventually(lambda: not is_there(bridge, proof_of(plain)), "the proof topic of the dead bridge is deleted")
    assert is_there(bridge, proof_of(prepared))  # it is open
    assert bridge.abort(prepared) is Outcome.ABORTED


def test_clearing_up_stops_when_the_bridge_is_closed(open_bridge: writing_kit.Connect) -> None:
    bridge = open_bridge(transactional_id=writing_kit.unique("owner"))
    bridge.close()
    assert writing_kit.owner_of(bridge)._cleanup._stop.is_set()


@pytest.mark.full
def test_a_broker_that_drops_what_it_may_drops_nothing_that_a_living_token_needs(start_pulsar, with_timing):
    short = {
        "brokerDeleteInactiveTopicsFrequencySeconds": "1",
        "managedLedgerMaxEntriesPerLedger": "2",
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "retentionCheckIntervalInSeconds": "1",
        "brokerDeduplicationEntriesInterval": "1",  # else what it remembers of producers keeps records, too
    }
    broker = start_pulsar(delete_unused=True, settings=short)
    id = writing_kit.unique("owner")
    with with_timing(**LONG_AGO), writing_kit.connect_to(broker.url, broker.admin_url, transactional_id=id) as bridge:
        topic = writing_kit.new_topic(bridge)
        old = [commit(bridge, topic, b"%d" % number) for number in range(4)]
    with with_timing(transactions_per_presence=1):
        with writing_kit.connect_to(broker.url, broker.admin_url, transactional_id=id) as bridge:
            young = [commit(bridge, topic, b"%d" % number) for number in range(4)]
            clean_up(bridge, proof_of(young[0]))
            eventually(lambda: bridge.status(old[0]).permanent, "the broker drops what it may")
            assert [writing_kit.state_of(bridge, token) for token in young] == [TokenState.COMMITTED] * 4
            with bridge.transaction() as txn:
                txn.send(topic, b"5")
                writing_kit.flush(txn)
                assert writing_kit.proof_topic_of(txn) == proof_of(young[0])
