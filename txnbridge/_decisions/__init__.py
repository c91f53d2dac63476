"""The decision log: processes decide the outcomes of transactions, and all of them agree on each outcome.

It is an ordered log; of the claims on an id, the first that counts decides. docs/decisions.md has the rules and their
reasons.

The modules, from the caller down to the bytes:
- `logs` opens the decision logs of a bridge, each at its first use.
- `decisions` is the interface for applications, `ledger` the one for backends. Both ask one `engine`.
- `engine` answers a `queries.Query` from the records that were read, and appends claims, presences and snapshots.
- `follower` appends to the log and reads the records that follow the last one read.
- `fold` draws the conclusions from the records; all rules are in it and in the modules that it uses: `completeness`
  (does this process know every record since the log's birth?), `token_fold` (transactions with tokens), `id_fold`
  (all other ids), `openings` (whose records still count), `conclusions` (the results of the folds).
- `records` defines each kind of record and its bytes.
"""
