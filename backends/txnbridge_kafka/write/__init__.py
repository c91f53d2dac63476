"""The writing side: who owns a transactional id, how it is opened, and transactions written under it.

`opening` opens an id so that nothing of an older owner lives on; `writer` writes one transaction after another on a
`producer`, which is thrown away when one of its requests may still be on its way; `prepared` has the ids of prepared
transactions; `publisher` sends without a transaction.
"""
