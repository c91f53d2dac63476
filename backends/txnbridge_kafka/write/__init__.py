"""The writing side: the owner of a transactional id, the opening of the id, and the transactions written under it.

`owner` records and checks which process owns an id, and `opening` opens the id so that no older owner can write under
it. `writer` writes one transaction after another: `producer_session` holds its `producer`, which is dropped when one of
its requests may still be under way, `acks` has the acknowledgements, and `failures` translates errors. `prepared` has
the transactional ids of prepared transactions; `publisher` sends without a transaction.
"""
