"""`LazyLedger`: a ledger whose decision log is opened at its first use, because most backends never use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge.spi import Ack, Held, Ledger, LedgerClaim, LedgerEntry, Partition


class LazyLedger(Ledger):
    """Forwards all calls to a ledger; the first call gets the ledger by `find_ledger`, within this call's deadline."""

    def __init__(self, find_ledger: Callable[[Deadline], Ledger]) -> None:
        self._find_ledger = find_ledger

    def opened(self, data: Mapping[str, Any], deadline: Deadline) -> str:
        return self._find_ledger(deadline).opened(data, deadline)

    def open_behind(self, before: str | None, data: Mapping[str, Any], deadline: Deadline) -> bool:
        return self._find_ledger(deadline).open_behind(before, data, deadline)

    def newest_opening(self, deadline: Deadline) -> tuple[str, Mapping[str, Any]] | None:
        return self._find_ledger(deadline).newest_opening(deadline)

    def begin(self, deadline: Deadline) -> Mapping[str, Any]:
        return self._find_ledger(deadline).begin(deadline)

    def record(self, kind: str, transaction: str, data: Mapping[str, Any], deadline: Deadline) -> None:
        self._find_ledger(deadline).record(kind, transaction, data, deadline)

    def find(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any] | None = None) -> list[LedgerEntry]:
        return self._find_ledger(deadline).find(transaction, deadline, log=log)

    def entries(self, kind: str, deadline: Deadline) -> list[LedgerEntry]:
        return self._find_ledger(deadline).entries(kind, deadline)

    def claim(
        self,
        transaction: str,
        decision: Decision,
        data: Mapping[str, Any],
        deadline: Deadline,
        *,
        log: Mapping[str, Any],
        acks: Sequence[Ack] = (),
    ) -> LedgerClaim:
        return self._find_ledger(deadline).claim(transaction, decision, data, deadline, log=log, acks=acks)

    def decided(self, transaction: str, deadline: Deadline, *, log: Mapping[str, Any]) -> LedgerClaim | None:
        return self._find_ledger(deadline).decided(transaction, deadline, log=log)

    def claims(self, deadline: Deadline) -> list[tuple[str, LedgerClaim]]:
        return self._find_ledger(deadline).claims(deadline)

    def acknowledged(self, group: str, deadline: Deadline) -> dict[Partition, tuple[str, LedgerClaim]]:
        return self._find_ledger(deadline).acknowledged(group, deadline)

    def positions(self, group: str, deadline: Deadline) -> tuple[dict[Partition, Position], Position]:
        return self._find_ledger(deadline).positions(group, deadline)

    def held(self, group: str, deadline: Deadline) -> dict[Partition, Held]:
        return self._find_ledger(deadline).held(group, deadline)
