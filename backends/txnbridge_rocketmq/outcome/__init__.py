"""Ends of transactions: by their tokens, directly by their owners, and in answer to the broker's check-backs."""
