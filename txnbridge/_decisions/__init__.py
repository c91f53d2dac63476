"""The decision log: everyone may decide, and nobody can disagree.

An ordered log in which the first claim on an id that counts wins. docs/decisions.md has the rules and their reasons.

A record goes down through the modules and comes back up as a conclusion: `decisions` (what an application says) and
`ledger` (what a backend says) both speak to one `engine`, which puts what they ask, a `questions.Question`, to what it
has read, and appends what is missing. `follower` appends to the log and reads on; `records` has each kind of record and
its bytes; `state` is the fold over them, in which alone the rules are.
"""

from __future__ import annotations

from txnbridge._decisions.decisions import Claim, Decisions, Lost, Opening, Reading
from txnbridge._decisions.questions import Id

__all__ = ["Claim", "Decisions", "Id", "Lost", "Opening", "Reading"]
