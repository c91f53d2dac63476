"""The end of transactions: `outcome` ends prepared transactions, and returns the outcome of any transaction.

`transaction_state_log` reads the coordinator's topic, which has decisions that the coordinator no longer describes.
`hanging_transactions` finds transactions whose control markers a broker has forgotten, and writes the markers;
`hanging_transaction_monitor` looks for such transactions in the partitions that this bridge uses.
"""
