"""Writing: the owner of a transactional id, writers of transactions, and the publisher without transactions."""
