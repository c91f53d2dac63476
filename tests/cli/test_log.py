import json
import sqlite3

import pytest

import txnbridge
from txnbridge import Decision, EvidenceLost, OutcomeUnknown

RENEW = ("log", "renew", "--application", "billing")


@pytest.fixture
def old(url):
    """A bridge that has used its application's log, which was then recreated behind its back."""
    with txnbridge.connect(url, application="billing") as bridge:
        decisions = bridge.decisions()
        decisions.open("owner")
        yield decisions
        decisions.close()


def stored(url):
    with sqlite3.connect(url.removeprefix("embedded:")) as file:
        return file.execute("SELECT count(*) FROM log_records").fetchone()[0]


def test_a_log_that_was_made_anew_is_renewed_only_with_yes_and_then_goes_on(invoke, url, old):
    begin = old.begin()
    old.claim("a-transaction", Decision.COMMIT, begin=begin)
    with sqlite3.connect(url.removeprefix("embedded:")) as file:  # the log loses all that it has
        file.execute("DELETE FROM log_records")
        file.execute("UPDATE logs SET first = 0, next = 0")
    with pytest.raises(EvidenceLost):  # the next record is of a process that has used it before
        old.claim(("late", 1), Decision.COMMIT)
    with txnbridge.connect(url, application="billing") as bridge:
        with pytest.raises(EvidenceLost, match="txnbridge log renew"):
            bridge.decisions().open("owner")

    before = stored(url)
    told = invoke(*RENEW)
    assert told.exit_code == 2, told.stderr
    assert "not its birth record" in told.stdout
    assert "--yes" in told.stdout
    assert stored(url) == before
    done = invoke(*RENEW, "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)["renewed_at"]) == (0, [before])

    with txnbridge.connect(url, application="billing") as bridge:
        new = bridge.decisions()
        with pytest.raises(OutcomeUnknown, match="began it anew"):
            new.read("a-transaction", begin=begin)
        opening = new.open("owner")
        claim = new.claim("another", Decision.COMMIT, begin=new.begin(opening=opening), opening=opening)
        assert (claim.decision, claim.mine) == (Decision.COMMIT, True)

    before = stored(url)
    for call in (old.begin, lambda: old.open("owner"), lambda: old.claim("late", Decision.COMMIT, begin=begin)):
        with pytest.raises(EvidenceLost):
            call()
    assert stored(url) == before


def test_log_renew_lists_the_ids_left_in_the_log_before_it_forgets_them(invoke, url, old):
    old.claim(("query", 7), Decision.COMMIT)
    with sqlite3.connect(url.removeprefix("embedded:")) as file:  # its first record is dropped
        file.execute("DELETE FROM log_records WHERE id = (SELECT min(id) FROM log_records)")
        file.execute("UPDATE logs SET first = 1")
    told = json.loads(invoke(*RENEW, "--json").stdout)
    assert (sorted(told["ids"]), told["renewed_at"]) == ([["owner"], ["query", 7]], None)
    assert "of these ids, and of ids that are lost already: query/7, owner" in invoke(*RENEW).stdout


def test_a_log_that_has_its_evidence_is_left_alone(invoke, url, old):
    result = invoke(*RENEW, "--yes")
    assert (result.exit_code, "nothing to renew" in result.stderr) == (2, True)
    assert old.claim(("free", 1), Decision.COMMIT).mine


@pytest.mark.parametrize("more", [(), ("--yes",)], ids=["look", "yes"])
def test_a_mistyped_name_is_told_and_no_log_begins_under_it(invoke, url, old, more):
    before = stored(url)
    result = invoke("log", "renew", "--application", "billign", "--json", *more)
    told = json.loads(result.stderr)
    assert (result.exit_code, told["error"], "'billign' is empty" in told["message"]) == (2, "NotFound", True)
    assert stored(url) == before
