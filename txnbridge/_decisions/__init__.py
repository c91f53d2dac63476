"""The decision log: processes decide the outcomes of transactions, and all of them agree on each outcome.

It is an ordered log of records about ids; docs/decisions.md has the rules and their reasons. Its words:
- A claim is a record that decides an id. The counting claim on an id is its first one that is not void.
- An opening is a record by which a process becomes the owner of an id. Later records of older owners are void.
- The evidence about an id is the part of the log that a process must have read to answer a query about the id. For a
  transaction with a token it begins at a presence record, by which the process that began the transaction announced
  itself, and which the token names; for any other id at the birth record, the first record of the log.
- A snapshot replaces all records up to one, the covered record. A renewal is an operator's record that begins the log
  anew: no record before it counts. A done mark says that all ids up to a number are finished.
- A ledger is the part of the log about one transactional id, for a backend.
- A prepared transaction that acknowledges on a partition holds it: until its end nobody else may acknowledge there.

The modules, from the caller down to the bytes:
- `logs` opens the decision logs of a bridge, each at its first use.
- `decisions` is the interface for applications, `ledger` the one for backends. Both ask one `engine`.
- `engine` answers a `queries.Query` from the records that were read, and appends claims, presence records, snapshots.
- `follower` appends to the log and reads the records that follow the last one read.
- `fold` draws the conclusions from the records; all rules are in it and in the modules that it uses: `completeness`
  (does this process know every record since the log's birth?), `token_fold` (transactions with tokens),
  `tokenless_fold` (all other ids), `conclusions` (the results of the folds, and whose records still count).
- `records` defines each kind of record and its bytes.
"""
