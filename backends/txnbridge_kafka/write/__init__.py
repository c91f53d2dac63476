"""The writing side: the owner of a transactional id, the opening of the id, and the transactions written under it.

`owner` records and checks which process owns an id. `opening` opens the id, which fences older owners. `writer` writes
one transaction after another, with a `producer` of confluent-kafka. `replaceable_producer` frees the producer, and
opens the id again, when one of its requests may still be under way. `acks` has the acknowledgements. `prepared` writes
prepared transactions, each under a transactional id that no other open transaction uses. `publisher` sends without a
transaction.
"""
