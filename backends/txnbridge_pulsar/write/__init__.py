"""The writing side: ownership of transactional ids, transactions, and sending without a transaction."""
