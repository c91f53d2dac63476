"""Mutants of the embedded broker. The docstring of each says what is wrong with it."""

import dataclasses
import random
from typing import Any

from txnbridge_embedded.admin.admin import EmbeddedAdmin
from txnbridge_embedded.outcome import ending
from txnbridge_embedded.write import staged_messages
from txnbridge_embedded.write.owner import Owner
from txnbridge_embedded.write.publisher import EmbeddedPublisher

from tests.conformance.mutants import Mutants, replace
from txnbridge import Decision, Outcome
from txnbridge.errors import Fenced
from txnbridge.spi import GroupInfo

EMBEDDED = Mutants()


@EMBEDDED.mutant("false-fence", workload="owners")
def fences_an_owner_without_a_newer_one() -> None:
    """A commit is at times refused as that of a fenced owner, although nobody has opened its id."""

    def check(owner: Owner, connection: Any) -> None:
        before(owner, connection)
        if owner.name is not None and random.random() < 0.1:
            raise Fenced("a newer owner has opened the id")

    before = replace(Owner, "check", check)


@EMBEDDED.mutant("outcome-lie", "split-decision", workload="transactions", seconds=35)
def says_committed_behind_the_hold() -> None:
    """A commit by token returns COMMITTED for a prepared transaction that was aborted at the end of its hold."""

    def decide(store: Any, connection: Any, transaction: str, decision: Decision, *rest: Any) -> Outcome:
        outcome: Outcome = before(store, connection, transaction, decision, *rest)
        wanted = "SELECT 1 FROM transactions WHERE id = ? AND reason = 'its deadline passed'"
        expired = connection.execute(wanted, (transaction,)).fetchone()
        return Outcome.COMMITTED if decision is Decision.COMMIT and expired else outcome

    before = replace(ending, "decide", decide)


@EMBEDDED.mutant("G1a", workload="groups")
def stores_the_same_sequence_again() -> None:
    """A publisher's message is stored, although one with its sequence is stored already."""
    replace(EmbeddedPublisher, "_last_taken", lambda *_: -1)


@EMBEDDED.mutant("wrong-partition", workload="transactions")
def chooses_any_partition_for_a_key() -> None:
    """Messages with the same key, for which the sender chooses no partition, go to any."""
    replace(staged_messages, "partition_of", lambda key, partitions: random.randrange(partitions))


@EMBEDDED.mutant("hang", workload="groups")
def lists_no_partition_that_is_read_to_its_end() -> None:
    """The lag of a group has only the partitions in which the group has messages left."""

    def group(admin: EmbeddedAdmin, *rest: Any) -> GroupInfo:
        found: GroupInfo = before(admin, *rest)
        return dataclasses.replace(found, lag={each: count for each, count in found.lag.items() if count})

    before = replace(EmbeddedAdmin, "group", group)


EMBEDDED.apply_chosen()
