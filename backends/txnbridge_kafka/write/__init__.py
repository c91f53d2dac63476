"""The writing side: who owns a transactional id, how it is opened, and transactions written under it.

`owner` keeps and checks who owns an id, and `opening` opens it so that nothing of an older owner lives on. `writer`
writes one transaction after another: `producer_session` holds its `producer`, which is thrown away when one of its
requests may still be under way, `acks` has the acknowledgements, and `failures` says what errors mean. `prepared` has
the ids of prepared transactions; `publisher` sends without a transaction.
"""
