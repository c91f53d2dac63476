"""Transactions, and the writers that they take."""
