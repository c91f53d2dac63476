"""The end of transactions: `outcome` ends prepared transactions, and returns the outcome of any transaction.

`transaction_state_log` reads the topic __transaction_state, for decisions that the coordinator no longer describes.
`hanging_transactions` finds hanging transactions and writes their missing control markers, and does so regularly in the
partitions that this bridge uses.
"""
