"""Looking at a query and finishing it without Spark."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress

import pytest
from click.testing import CliRunner
from pyspark_txnbridge._write.batch_identity import BatchId, BatchInDoubt

import txnbridge
from tests.failing import EACH, fail_call
from tests.log_contract import place_of
from tests.spark.kit import forget, left_open, mostly_embedded, new_run, options, published, run_batch, write
from txnbridge import Bridge, Capability, EvidenceLost, Fenced
from txnbridge.capabilities import absent
from txnbridge.cli import main
from txnbridge.testing import Child

FIRST = [[0, 1, 2], [3, 4]]


@pytest.fixture
def spark_command(sink, query):
    def run(name, *arguments, **given):
        where = ["--url", sink.url, "--prefix", sink.prefix]
        found = CliRunner().invoke(
            main, ["spark", name, *where, *(given.get("which") or ["--query", query]), *arguments]
        )
        return found.exit_code, found.output

    return run


def decide_and_die(start):
    sink, query = start
    run_batch(sink, BatchId(query, "sink", 0, "the-run"), FIRST)


def die_decided(sink, query):
    with Child(decide_and_die, (sink, query), kill="resolve/before/1") as child:
        child.stopped()


def test_a_decided_batch_is_shown_and_published(sink, query, spark_command):
    die_decided(sink, query)
    code, text = spark_command("status")
    assert code == 0
    assert "last run: the-run" in text
    assert "published: no batch" in text
    assert "batch 0: decided, 5 rows" in text
    assert text.count("prepared, until") >= 2
    assert published(sink) == []
    assert spark_command("recover") == (0, "published: batch 0\n")
    assert published(sink) == [0, 1, 2, 3, 4]
    assert spark_command("recover") == (0, "published: nothing was left to publish\n")
    assert "every batch up to 0" in spark_command("status")[1]
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)  # Spark replays it
    assert published(sink) == [0, 1, 2, 3, 4]


def test_the_status_is_one_document_for_scripts(sink, query, spark_command):
    die_decided(sink, query)
    code, text = spark_command("status", "--json")
    found = json.loads(text)
    assert (code, found["run"], found["done_up_to"]) == (0, "the-run", None)
    (batch,) = found["undone"]
    assert (batch["batch"], batch["decision"], batch["rows"]) == (0, "commit", 5)
    assert [part["rows"] for part in batch["parts"]] == [3, 2]


def test_the_status_says_that_a_broker_lists_no_transactions(sink, query, spark_command, monkeypatch):
    die_decided(sink, query)
    found = vars(Bridge)["capabilities"].fget
    monkeypatch.setattr(Bridge, "capabilities", property(lambda b: found(b).but({Capability.LIST_OPEN: absent("")})))
    assert "open transactions: unknown" in spark_command("status")[1]
    assert json.loads(spark_command("status", "--json")[1])["open"] is None


def test_the_query_is_found_by_its_checkpoint(sink, query, spark_command, tmp_path):
    die_decided(sink, query)
    (tmp_path / "metadata").write_text(json.dumps({"id": query}))
    assert "batch 0: decided" in spark_command("status", which=["--checkpoint", str(tmp_path)])[1]
    code, text = spark_command("status", which=["--checkpoint", str(tmp_path / "nothing")])
    assert code == 2
    assert "give the query's id instead" in text


def test_a_query_with_a_name_is_found_beside_its_checkpoint(sink, query, spark_command, tmp_path):
    die_decided(sink, query)
    (tmp_path / "metadata").write_text(json.dumps({"id": "another"}))
    which = ["--checkpoint", str(tmp_path), "-o", f"txnAppId={query}"]
    assert "batch 0: decided" in spark_command("status", which=which)[1]


def test_a_batch_that_lost_a_transaction_is_skipped_only_when_told(sink, query, spark_command):
    die_decided(sink, query)
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))
        bridge.abort(claim.data["parts"][0]["token"])
    code, text = spark_command("recover")
    assert code != 0
    assert f"3 rows of task partition 0 are not published (topics: {sink.topic})" in text
    url, _, options = sink.url.partition("?")  # the options may hold secrets
    where = f"--url {shlex.quote(f'{url}?…') if options else url} --query {query} --prefix {sink.prefix}"
    assert f"then: txnbridge spark recover {where} --skip 0" in text.replace("\n", " ")
    with pytest.raises(BatchInDoubt):
        run_batch(sink, BatchId(query, "sink", 0, new_run()), [[0, 1, 2, 3, 4]])
    skipped = "skipped: batch 0 counts as published from now on, whatever was published of it\n"
    assert spark_command("recover", "--skip", "0") == (0, f"published: nothing was left to publish\n{skipped}")
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    run_batch(sink, BatchId(query, "sink", 1, new_run()), [[5]])
    assert published(sink) == [3, 4, 5]
    done = json.loads(spark_command("recover", "--skip", "1", "--json")[1])
    assert done == {"published": [], "skipped": 1, "aborted": []}


@mostly_embedded
def test_a_batch_with_a_transaction_that_nobody_knows_is_skipped_when_told(sink, query, spark_command, monkeypatch):
    """A driver died behind its last commit, and was started again when the broker had forgotten the transactions."""
    die_decided(sink, query)
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))

    is_first = lambda bridge, token: token == claim.data["parts"][0]["token"]  # noqa: E731
    fail_call(monkeypatch, Bridge, "commit", EvidenceLost("nothing is known of it"), EACH, when=is_first)
    with pytest.raises(BatchInDoubt, match=r"3 rows of task partition 0 .*--skip 0"):
        run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    code, text = spark_command("recover", "--skip", "0")
    assert (code, "skipped: batch 0" in text) == (0, True)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    run_batch(sink, BatchId(query, "sink", 1, new_run()), [[5]])
    assert published(sink) == [3, 4, 5]


def test_clearing_ends_undecided_transactions_and_fences_the_driver(sink, query, spark_command):
    identity = BatchId(query, "sink", 0, new_run())
    write(sink, identity, FIRST)
    assert spark_command("recover")[1] == "published: nothing was left to publish\n"
    assert len(left_open(sink, query)) == 2
    code, text = spark_command("recover", "--clear")
    assert (code, text.count("aborted: ")) == (0, 2)
    assert left_open(sink, query) == []
    forget()
    with pytest.raises(Fenced):
        write(sink, identity, FIRST)
    with suppress(Fenced):
        run_batch(sink, identity, FIRST)
    assert published(sink) == []


def test_status_says_that_a_query_never_wrote(spark_command):
    assert "has not written anything" in spark_command("status")[1]


BROKERS = [pytest.param(name, marks=pytest.mark.full) for name in ("kafka", "pulsar", "rocketmq")]


@pytest.fixture(params=["sqlite", "embedded", *BROKERS])
def place(request, tmp_path):
    return place_of(request.param, request, tmp_path)


def test_a_query_may_keep_its_decisions_elsewhere(url, query, place, spark_command):
    if url.startswith(place):
        pytest.skip("that is no other place")
    sink = options(url, topic=f"out-{new_run()}", transactionalIdPrefix="elsewhere", decisionLog=place)
    assert place not in repr(sink)
    which = ["--url", url, "--prefix", "elsewhere", "--query", query]
    die_decided(sink, query)
    assert "has not written anything" in spark_command("status", which=which)[1]
    assert "batch 0: decided, 5 rows" in spark_command("status", which=[*which, "--decision-log", place])[1]
    assert spark_command("recover", which=[*which, "--decision-log", place]) == (0, "published: batch 0\n")
    assert published(sink) == [0, 1, 2, 3, 4]
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)  # Spark replays it
    assert published(sink) == [0, 1, 2, 3, 4]
