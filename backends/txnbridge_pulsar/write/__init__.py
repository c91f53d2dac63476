"""Writing: the owner of a transactional id with its fence topic, writers of transactions, and the publisher."""
