"""Clients of a run without txnbridge: each broker's official client, with the same interface."""
