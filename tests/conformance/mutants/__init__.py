"""Mutants: a backend with one rule less, to prove that a conformance run finds what the rule is there for.

Each module has the mutants of one backend. As a plug-in of a run it changes the backend in every process of the run:

    TXNBRIDGE_MUTANT=acks_outside txnbridge conformance run kafka --plugin tests.conformance.mutants.kafka
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

VARIABLE = "TXNBRIDGE_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """A change of a backend, and the findings of which a run has at least one. `seeds` are tried in turn."""

    change: Callable[[], None]
    finds: frozenset[str]
    seconds: int
    seeds: tuple[int, ...]


@dataclass
class Mutants:
    """The mutants of one backend, by name."""

    by_name: dict[str, Mutant] = field(default_factory=dict)

    def mutant(
        self, *finds: str, seconds: int = 30, seeds: tuple[int, ...] = (1, 2, 3)
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Return a decorator for a function that changes the backend. A run has to find one of `finds`."""

        def add(change: Callable[[], None]) -> Callable[[], None]:
            self.by_name[change.__name__] = Mutant(change, frozenset(finds), seconds, seeds)
            return change

        return add

    def apply_chosen(self) -> None:
        """Change the backend of this process by the mutant that the environment variable names, if it names one."""
        if name := os.environ.get(VARIABLE):
            self.by_name[name].change()
