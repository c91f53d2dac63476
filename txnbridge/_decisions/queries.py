"""Queries about ids, and the records of the log that a process must have read to answer them: the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from txnbridge._decisions.conclusions import CountingClaim, KnownOpening
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.records import EvidenceBegin, IdPath, read_begin, read_path
from txnbridge.errors import EvidenceLost, Fenced, InvalidOption, InvalidState, InvalidToken, OutcomeUnknown

Id = str | tuple[str | int, ...]

# An id must fit into one record together with the record's body, and JSON may need six bytes for each character.
_LONGEST_ID = 1_000


@dataclass(frozen=True)
class Query:
    """A query: is a transaction committed? `begin`: the log's first record that may tell (None: the first of all)."""

    id: Id
    path: IdPath
    begin: EvidenceBegin | None

    @property
    def name(self) -> str:
        return name_of(self.id)

    def has_evidence(self, state: LogState) -> bool:
        return state.completeness.complete if self.begin is None else state.holds(self.begin)

    def claim(self, state: LogState) -> CountingClaim | None:
        """Return the claim that decides the id by the records that `state` has read; None if there is none.

        Raise `EvidenceLost` if needed records are gone, `OutcomeUnknown` if the log cannot be read, `InvalidState` for
        an id that is marked done.
        """
        if self.begin is None:
            require_complete(state)
            if state.ids.is_done(self.path):
                raise InvalidState(f"{self.name} is marked done: its decision is carried out and no longer kept")
            if self.path in state.tokens.claims:
                # A claim without `begin` would decide the token's transaction a second time.
                text = f"{self.name} is the id of a token: say where its evidence begins (begin=token.log)"
                raise InvalidOption(text)
            return state.ids.claims.get(self.path)
        require_begin(state, self.begin)
        return state.tokens.claims.get(self.path, {}).get(self.begin)


def require_readable(state: LogState) -> None:
    if state.blocked:
        raise OutcomeUnknown(f"the decision log cannot be read on: {state.blocked}")


def require_complete(state: LogState) -> None:
    if not state.completeness.complete:
        require_readable(state)
        text = f"this decision log proves nothing about ids without a token: {state.completeness.incomplete_because};"
        raise EvidenceLost(text + " `txnbridge log renew` begins it anew, and forgets all of that")


def require_begin(state: LogState, begin: EvidenceBegin) -> None:
    if state.holds(begin):
        return
    require_readable(state)
    if state.cursor is not None and begin.at > state.cursor[0]:
        raise OutcomeUnknown(
            f"the decision log ends at {list(state.cursor[0])}, before {list(begin.at)} where this token's evidence"
            f" begins: the broker answers from an old copy, or has lost records{_renewal(state)}"
        )
    text = f"the presence record at {list(begin.at)} where this token's evidence begins is not in the decision log: it"
    raise EvidenceLost(text + f" was trimmed, or the log was truncated or recreated{_renewal(state)}")


def _renewal(state: LogState) -> str:
    if (renewed := state.completeness.renewed) is None:
        return ""
    when = datetime.fromtimestamp(renewed.at / 1000, UTC).isoformat(" ", "seconds")
    return f"; `txnbridge log renew` began it anew at {when} on {renewed.host}, and nothing older can be told"


def require_body(id: Id, claim: CountingClaim) -> Mapping[str, Any]:
    """Return the data of a claim. Raise `EvidenceLost` if a part of the data is gone from the log."""
    if claim.body is None:
        raise EvidenceLost(
            f"{name_of(id)} was decided to {claim.decision.value}, but the data of that decision is gone"
        )
    return claim.body


def fenced(newest: KnownOpening | None) -> Fenced:
    if newest is None:
        return Fenced("this opening is not in the decision log: open the id again")
    host = newest.host or "another process"
    return Fenced(
        f"{name_of(id_of(newest.under.id))} was opened by {host} since: this owner must stop", newer=newest.host or None
    )


def path_of(id: Id) -> IdPath:
    try:
        path = read_path([id] if isinstance(id, str) else id)
    except (TypeError, ValueError):
        raise InvalidOption(f"an id is text or a tuple of text and numbers, not {id!r:.100}") from None
    if not isinstance(path[0], str) or not path[0] or sum(len(str(part)) for part in path) > _LONGEST_ID:
        raise InvalidOption(f"an id begins with text that is not empty, and takes at most {_LONGEST_ID} characters")
    return path


def id_of(path: IdPath) -> Id:
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def name_of(id: Id) -> str:
    return id if isinstance(id, str) else "/".join(str(part) for part in id)


def begin_of(begin: Mapping[str, Any] | None) -> EvidenceBegin | None:
    if begin is None:
        return None
    try:
        return read_begin({"at": begin["at"], "id": begin["id"]})
    except (KeyError, TypeError, ValueError):
        raise InvalidToken("this token does not say where its evidence in the decision log begins") from None
