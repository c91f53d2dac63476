"""`HalfDecisions`: the claims on half messages in an application's decision log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from txnbridge._connection import Connection
from txnbridge._deadline import Deadline
from txnbridge._half_records import StoredHalf
from txnbridge._token import Decision
from txnbridge.errors import EvidenceLost

if TYPE_CHECKING:
    from txnbridge._decision_logs import DecisionLogs
    from txnbridge._decisions import Claim, Decisions


class HalfDecisions:
    """Claims and reads decisions about halves. Any thread may use it.

    The claim that commits a half names, as `copy`, the copy that is published. Evidence in a decision log expires, so a
    half that stays undecided for long is given new evidence: a claim on the old evidence names the new one as `next`,
    and decides nothing.
    """

    def __init__(self, logs: DecisionLogs, connection: Connection, application: str) -> None:
        self._logs = logs
        self._connection = connection
        self.application = application

    def _log(self, deadline: Deadline) -> Decisions:
        return self._logs.shared(self.application, deadline)

    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        return self._log(deadline).begin(timeout=deadline)

    def claim(self, half: StoredHalf, decision: Decision, deadline: Deadline) -> Claim:
        """Claim a decision; return the claim that counts. A COMMIT names this copy."""
        log, place = self._log(deadline), half.log
        said = {"copy": half.copy} if decision is Decision.COMMIT else {}
        while True:
            claim = log.claim(half.transaction, decision, said, begin=place, timeout=deadline)
            if "next" not in claim.data:
                return claim
            place = claim.data["next"]

    def read(self, halves: Sequence[StoredHalf], deadline: Deadline) -> list[Claim | EvidenceLost | None]:
        """Return the claim that counts for each half, the error if its evidence is lost, None while it is undecided."""
        log = self._log(deadline)
        places = {number: half.log for number, half in enumerate(halves)}
        found: dict[int, Claim | EvidenceLost | None] = {}
        while places:
            asked = [(halves[number].transaction, place) for number, place in places.items()]
            claims = dict(zip(places, log.read_all(asked, timeout=deadline), strict=True))
            found.update(claims)
            places = {
                number: claim.data["next"]
                for number, claim in claims.items()
                if claim is not None and not isinstance(claim, EvidenceLost) and "next" in claim.data
            }
        return [found[number] for number in range(len(halves))]

    def with_lasting_evidence(self, half: StoredHalf, deadline: Deadline) -> StoredHalf:
        """Return the half with new evidence if its evidence is old, else unchanged."""
        now = int(time.time() * 1000)
        if now - half.log_at < self._connection.timing.half_evidence * 1000:
            return half
        log = self._log(deadline)
        new = log.begin(timeout=deadline)
        if new == half.log:
            return half
        claim = log.claim(half.transaction, Decision.ABORT, {"next": new}, begin=half.log, timeout=deadline)
        # Another process may have decided the half, or renewed its evidence: then readers follow that claim.
        return half if "next" not in claim.data else replace(half, log=claim.data["next"], log_at=now)
