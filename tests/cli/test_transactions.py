"""`status`, and `transactions list|describe|commit|abort`."""

import json
import logging
from dataclasses import replace

import pytest

import txnbridge
from tests.conformance.broken import around
from tests.core.processor_kit import send, values
from txnbridge.testing import recorded


@pytest.fixture
def prepared(bridge):
    """A prepared transaction of two messages."""
    with bridge.transaction(prepare=True) as txn:
        txn.send("orders", b"one")
        txn.send("orders", b"two")
    return txn


@pytest.mark.parametrize(("end", "word", "code"), [("commit", "committed", 0), ("abort", "aborted", 5)])
def test_status_tells_each_state_by_word_and_code_and_changes_nothing(invoke, bridge, prepared, end, word, code):
    token = str(prepared.token)
    before = invoke("status", token)
    assert (before.exit_code, before.stdout.split()[0].rstrip(",")) == (1, "prepared")
    assert "if nobody ends it before" in before.stdout
    assert getattr(bridge, end)(token).value == word
    after = invoke("status", token)
    assert (after.exit_code, after.stdout.split()[0]) == (code, word)


def test_status_as_json(invoke, prepared):
    assert json.loads(invoke("status", str(prepared.token), "--json").stdout) == {
        "transaction": prepared.id,
        "state": "prepared",
        "expires_at": prepared.token.expires_at,
        "reason": "",
        "permanent": False,
    }


def test_a_text_that_is_no_token_is_a_wrong_call(refused, url):
    for token in ("nonsense", "txb1.AAAA"):
        assert "token" in refused("status", token)


def test_open_transactions_are_listed(invoke, prepared):
    header, line = invoke("transactions", "list").stdout.splitlines()
    assert header.split() == ["transaction", "state", "owner", "since", "expires", "messages"]
    assert line.split()[:2] == [prepared.id, "prepared"]
    assert line.split()[-1] == "2"


def test_transactions_as_json(invoke, prepared):
    [found] = json.loads(invoke("transactions", "list", "--json").stdout)
    assert found == json.loads(invoke("transactions", "describe", prepared.id, "--json").stdout)
    whose = ("transaction", "state", "owner", "transactional_id", "prepares_until", "since", "expires_at")
    assert set(found) == {*whose, "partitions", "groups", "messages", "token"}
    assert (found["transaction"], found["state"], found["messages"]) == (prepared.id, "prepared", 2)
    assert found["partitions"] == [["orders", 0]]
    assert txnbridge.Token.parse(found["token"]).transaction == prepared.id


def test_describe_shows_the_fields_of_a_transaction(invoke, url, prepared, broken_broker):
    strange = lambda inner, *given: [replace(each, owner="\x1b[2J") for each in inner.transactions(*given)]  # noqa: E731
    url = url.replace("embedded", broken_broker(Administering=around(transactions=strange)))
    told = invoke("transactions", "describe", prepared.id, "--url", url).stdout
    shown = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert shown["transaction"] == prepared.id
    assert (shown["state"], shown["partitions"], shown["owner"]) == ("prepared", "orders[0]", "\\x1b[2J")
    assert txnbridge.Token.parse(shown["token"]).transaction == prepared.id


@pytest.fixture(params=["id", "token"])
def name(request, prepared):
    """The prepared transaction as the command line may name it."""
    return prepared.id if request.param == "id" else str(prepared.token)


@pytest.mark.parametrize("more", [[], ["--yes"], ["--reason", "because"], ["--yes", "--reason", ""]], ids=" ".join)
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_no_transaction_is_ended_without_yes_and_reason(invoke, bridge, prepared, name, decision, more):
    result = invoke("transactions", decision, name, *more)
    assert result.exit_code == 2
    assert result.stdout.startswith(f"would {decision} transaction {prepared.id}, now prepared")
    assert bridge.status(prepared.token).state is txnbridge.TokenState.PREPARED


def test_commit_without_yes_tells_in_json_what_it_would_do(invoke, prepared, name):
    result = invoke("transactions", "commit", name, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 2
    assert (answer["transaction"], answer["would"]) == (prepared.id, "commit")
    assert answer["state"].startswith("prepared")


@pytest.mark.parametrize(
    ("decision", "outcome", "left"), [("commit", "committed", [b"one", b"two"]), ("abort", "aborted", [])]
)
def test_a_prepared_transaction_is_ended_by_hand(invoke, bridge, prepared, name, decision, outcome, left):
    result = invoke("transactions", decision, name, "--yes", "--reason", "the payment came", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"transaction": prepared.id, "outcome": outcome, "reason": "the payment came"}
    send(bridge, "orders", b"marker")
    assert values(bridge, "orders") == [*left, b"marker"]


def test_an_open_transaction_is_aborted_by_hand_but_not_committed_and_its_owner_learns_it(invoke, bridge, url):
    with txnbridge.connect(f"{url}?spill_bytes=1") as other:  # what it sends is in the file before its end
        with pytest.raises(txnbridge.TransactionAborted), other.transaction() as txn:
            txn.send_many("orders", [b"one", b"two"])
            [found] = bridge.admin.transactions()
            assert found.state == "open"
            for decision, code, told in (("commit", 2, ""), ("abort", 0, "aborted\n")):
                result = invoke("transactions", decision, found.transaction, "--yes", "--reason", "stuck")
                assert (result.exit_code, result.stdout) == (code, told)
    send(bridge, "orders", b"marker")
    assert values(bridge, "orders") == [b"marker"]


@pytest.mark.parametrize(
    ("first", "late", "code", "told"), [("abort", "commit", 5, "aborted"), ("commit", "abort", 1, "committed")]
)
def test_the_true_outcome_is_told_when_it_is_another(invoke, bridge, prepared, first, late, code, told):
    token = str(prepared.token)
    getattr(bridge, first)(token)
    result = invoke("transactions", late, token, "--yes", "--reason", "x")
    assert (result.exit_code, result.stdout) == (code, f"{told}\n")


def test_the_reason_goes_into_the_log_and_the_event(invoke, prepared, name, caplog):
    with recorded() as events, caplog.at_level(logging.WARNING, "txnbridge"):
        invoke("transactions", "commit", name, "--yes", "--reason", "the payment came")
    assert [record.getMessage() for record in caplog.records if "the payment came" in record.getMessage()] == [
        f"transaction {prepared.id}: commit by hand, it is committed; reason: the payment came"
    ]
    [event] = [e for e in events if e.name == "resolve" and e.phase == "after"]
    assert event.transaction == prepared.id
    # By token it is what any process may do; by id it is an administrator's act, told with the reason.
    assert event.data.get("reason") == (None if name == str(prepared.token) else "the payment came")
    assert (event.data["decision"], event.data["outcome"]) == ("commit", "committed")


def test_repair_without_yes_tells_in_json_what_it_would_do(invoke, bridge):
    told = invoke("transactions", "repair", "billing/1/1", "--json")
    assert (told.exit_code, json.loads(told.stdout)) == (2, {"transaction": "billing/1/1", "would": "repair"})
