"""The end of transactions: `outcome` ends prepared ones and tells the outcome of any, by the coordinator's word.

What the coordinator has forgotten is in its own topic, which `transaction_state_log` reads. `hanging_transactions`
finds transactions whose markers a broker has forgotten, and writes the markers; `hanging_transaction_monitor` looks for
such transactions in the partitions that this bridge uses.
"""
