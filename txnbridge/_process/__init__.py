"""Processors: what they do with each message, its failures, retries and dead letters."""
