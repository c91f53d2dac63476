"""The decision log: everyone may decide, and nobody can disagree.

An ordered log in which the first claim on an id that counts wins. docs/decisions.md has the rules and their reasons.

The modules, from the caller down to the bytes:
- `decisions` is the interface for applications, `ledger` the one for backends. Both ask one `engine`.
- `engine` answers a `queries.Query` from what was read, and appends the records that are missing.
- `follower` appends to the log and reads on.
- `fold` draws the conclusions, and alone knows the rules: `trust` (is the reading complete?), `token_fold`
  (transactions
  with tokens), `id_fold` (all other ids), `openings` (whose records still count), `conclusions` (their results).
- `records` has each kind of record and its bytes.
"""

from __future__ import annotations

from txnbridge._decisions.decisions import Claim, Decisions, IncompleteLog, Opening, Reading
from txnbridge._decisions.queries import Id

__all__ = ["Claim", "Decisions", "Id", "IncompleteLog", "Opening", "Reading"]
