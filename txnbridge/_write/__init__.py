"""Transactions, and sends without a transaction.

- `transaction` is the interface for programs. `token_operations` ends transactions by their tokens, from any process.
- `writers` lends a writer to each transaction. A writer is an identity at the broker with one transaction at a time.
- `group_commit` lets small transactions of several threads share one transaction of the broker.
- `publisher` sends without a transaction.
"""
