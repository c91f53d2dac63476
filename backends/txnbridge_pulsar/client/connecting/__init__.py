"""Connections to brokers: found by lookup, dialed, logged in, and pooled."""
