"""Mutants of the RocketMQ backend. Each replaces a function or two; the docstring names what is then wrong."""

from collections.abc import Sequence
from typing import Any

from txnbridge_rocketmq.half_store import RocketMQHalfStore
from txnbridge_rocketmq.outcome import check_back, end_transaction, outcome
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.read.reader import RocketMQReader
from txnbridge_rocketmq.write.half_buffer import HalfCount, halves_as_json
from txnbridge_rocketmq.write.writer import RocketMQWriter

from tests.conformance.mutants import Mutants, nothing, replace
from txnbridge._decisions.token_fold import TokenFold
from txnbridge.spi import Ack, Deadline, Decision, Half, Ledger, LedgerClaim, Outcome

ROCKETMQ = Mutants()


@ROCKETMQ.mutant("early-read", "G1a", workload="transactions")
def publishes_at_once() -> None:
    """Halves are published as soon as all are stored, before the decision."""

    def store_and_publish(self: RocketMQWriter, deadline: Deadline) -> None:
        store(self, deadline)
        self._owner.ender.publish_fresh(self._begun.transaction, self._halves.stored(), deadline)

    store = replace(RocketMQWriter, "_store", store_and_publish)


@ROCKETMQ.mutant("lost-prepare", workload="transactions")
def aborts_before_the_deadline() -> None:
    """A check-back lets an undecided transaction be aborted before its deadline (hazard H67)."""
    replace(check_back, "is_over", lambda *_: True)


@ROCKETMQ.mutant("duplicate", "foreign-duplicate", workload="transactions", needs="rocketmq")
def publishes_without_a_look() -> None:
    """Halves are committed without a look-up that shows which messages are published already (hazard H62)."""

    def publish(
        self: HalfEnder, transaction: str, topics: Sequence[HalfCount], deadline: Deadline, *, first: bool = False
    ) -> None:
        halves = self._sequences(end_transaction._expected(transaction, topics), deadline)
        self._commit_halves(halves, True, deadline)

    replace(HalfEnder, "publish", publish)


@ROCKETMQ.mutant("zombie-write", "split-decision", "outcome-lie", workload="owners", seconds=40)
def commits_without_a_record() -> None:
    """A commit of a transaction without acknowledgements is not written to the decision log (hazard H66).

    So an owner that pauses commits although a newer one has opened its id meanwhile.
    """

    def claim_aborts_and_acks(
        self: RocketMQWriter, decision: Decision, deadline: Deadline, acks: Sequence[Ack] = ()
    ) -> LedgerClaim:
        if decision is Decision.COMMIT and not acks:
            return LedgerClaim(decision, halves_as_json(self._halves.topics), None)
        return claim(self, decision, deadline, acks)  # type: ignore[no-any-return]

    claim = replace(RocketMQWriter, "_claim", claim_aborts_and_acks)


@ROCKETMQ.mutant("lost-prepare", workload="owners")
def aborts_what_an_older_owner_prepared() -> None:
    """A newer opening of the transactional id aborts prepared transactions, too (hazard H72)."""

    def is_abandoned(ledger: Ledger, transaction: str, origin: Any, deadline: Deadline) -> bool:
        newest = ledger.newest_opening(deadline)
        return origin.opening is not None and newest is not None and newest[0] != origin.opening

    replace(check_back, "_is_abandoned", is_abandoned)


@ROCKETMQ.mutant("zombie-write", workload="owners")
def lets_zombies_decide() -> None:
    """The claim of a fenced owner counts (hazard H72)."""
    replace(TokenFold, "_is_shut_out", lambda *_: False)


@ROCKETMQ.mutant("split-decision", workload="transactions")
def says_what_it_was_asked() -> None:
    """The outcome of a token is what the call asked for, although an earlier call decided otherwise."""

    def end_and_agree(ender: Any, token: Any, decision: Decision, *more: Any) -> Outcome:
        end(ender, token, decision, *more)
        return Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED

    end = replace(outcome, "end_prepared", end_and_agree)


@ROCKETMQ.mutant("half-ack", workload="groups")
def skips_what_was_aborted() -> None:
    """A reader does not go back after an abort: the next acknowledgement passes the messages."""
    replace(RocketMQReader, "rewind", nothing)


@ROCKETMQ.mutant("phantom-commit", workload="half-messages")
def publishes_undecided_halves() -> None:
    """A half message whose local work is undecided is published."""

    def end_decided(self: RocketMQHalfStore, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        ended: Outcome = end(self, half, Decision.COMMIT if decision is Decision.UNDECIDED else decision, deadline)
        return ended

    end = replace(RocketMQHalfStore, "end", end_decided)


ROCKETMQ.apply_chosen()
