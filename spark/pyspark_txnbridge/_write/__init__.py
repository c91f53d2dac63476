"""Writing: each task prepares a transaction, and the driver decides and commits those of a batch together."""
