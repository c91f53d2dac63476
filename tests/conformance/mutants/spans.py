"""Mutants of spans. The docstring of each says what is wrong with it."""

from collections.abc import Sequence
from typing import Any

from tests.conformance.mutants import Mutants, replace
from txnbridge import Bridge, Decision, Outcome, Token
from txnbridge._half import span
from txnbridge._half.span import Span, Spans

SPANS = Mutants()


def expire_soon() -> None:
    """Let what a mutant leaves prepared expire while the run waits, and not a minute later; no pause is so long."""
    replace(span, "_SECONDS_BETWEEN", 20.0)


@SPANS.mutant("torn-span", workload="spanning", seconds=35, seeds=(2, 3, 4))
def stores_the_record_late() -> None:
    """The record is stored when the first part is committed already."""
    expire_soon()
    bridges: dict[str, Bridge] = {}

    def use(spans: Spans, given: Sequence[Any]) -> None:
        bridges.update({bridge.cluster: bridge for bridge in given})
        known(spans, given)

    def decide(spans: Spans, of: Span, deadline: Any) -> None:
        bridges[of.tokens[0].cluster].commit(of.tokens[0])
        before(spans, of, deadline)

    known, before = replace(Spans, "use", use), replace(Spans, "decide", decide)


@SPANS.mutant("torn-span", workload="spanning")
def commits_the_second_part_first() -> None:
    """The part that decides is committed behind the others."""
    expire_soon()

    def execute(spans: Spans, half: Any, of: Span) -> Decision:
        of.tokens.reverse()
        decision: Decision = before(spans, half, of)
        return decision

    before = replace(Spans, "_execute", execute)


@SPANS.mutant("torn-span", workload="spanning")
def takes_an_expired_part_for_a_committed_one() -> None:
    """The other parts are committed although the one that decides has expired."""
    expire_soon()

    def end_others(spans: Spans, transaction: str, outcome: Outcome, tokens: Sequence[Token], **more: Any) -> Decision:
        decision: Decision = before(spans, transaction, Outcome.COMMITTED, tokens, **more)
        return decision

    before = replace(Spans, "_end_others", end_others)


SPANS.apply_chosen()
