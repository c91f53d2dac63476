"""Mutants: a backend with one rule less, to prove that a conformance run finds what the rule is there for.

Each module has the mutants of one backend. As a plug-in of a run it changes the backend in every process of the run:

    TXNBRIDGE_MUTANT=acks_outside txnbridge conformance run kafka --plugin tests.conformance.mutants.kafka
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from txnbridge import Outcome
from txnbridge._decisions.tokenless_fold import IdFold

VARIABLE = "TXNBRIDGE_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """A change of a backend, and the findings of which a run has at least one. `seeds` are tried in turn.

    `workload` is the workload that needs the missing rule; with this one alone a run attacks it more often. `needs` is
    a module without which nothing is found, such as an official client. `faults` are the kinds of faults that show the
    harm, if those of clients do not: for them a run starts a broker of its own.
    """

    change: Callable[[], None]
    finds: frozenset[str]
    seconds: int
    workload: str
    seeds: tuple[int, ...]
    needs: str | None
    faults: str | None


@dataclass
class Mutants:
    """The mutants of one backend, by name."""

    by_name: dict[str, Mutant] = field(default_factory=dict)

    def mutant(
        self,
        *finds: str,
        workload: str,
        seconds: int = 20,
        seeds: tuple[int, ...] = (1, 2, 3),
        needs: str | None = None,
        faults: str | None = None,
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Return a decorator for a function that changes the backend. A run has to find one of `finds`."""

        def add(change: Callable[[], None]) -> Callable[[], None]:
            self.by_name[change.__name__] = Mutant(change, frozenset(finds), seconds, workload, seeds, needs, faults)
            return change

        return add

    def add_shared(self, module: object) -> None:
        """Add the mutants that several backends have, of which `module` has or uses `end_prepared`."""

        def says_what_was_asked() -> None:
            say_what_was_asked(module)

        self.mutant("split-decision", workload="transactions")(says_what_was_asked)
        self.mutant("split-decision", workload="decisions")(lets_the_last_claim_win)

    def apply_chosen(self) -> None:
        """Change the backend of this process by the mutant that the environment variable names, if it names one."""
        if name := os.environ.get(VARIABLE):
            self.by_name[name].change()


def replace(where: object, name: str, by: Any) -> Any:
    """Replace an attribute of a module or class, and return the attribute that was there before."""
    before = getattr(where, name)
    setattr(where, name, by)
    return before


def nothing(*args: object, **named: object) -> None:
    """Do nothing, in place of the function of a rule that is left out."""


def lets_the_last_claim_win() -> None:
    """Let the last claim on an id of a decision log decide, instead of the first."""

    def claim(fold: IdFold, record: Any, found: Any) -> bool:
        fold.claims[record.id] = found
        return True

    replace(IdFold, "claim", claim)


def say_what_was_asked(module: object) -> None:
    """Return the wanted outcome from `end_prepared`, although another process may have ended the transaction before."""

    def end_prepared(cluster: Any, token: Any, commit: bool, *rest: Any) -> Outcome:
        before(cluster, token, commit, *rest)
        return Outcome.COMMITTED if commit else Outcome.ABORTED

    before = replace(module, "end_prepared", end_prepared)
