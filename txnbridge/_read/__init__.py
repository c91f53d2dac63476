"""Consumers and readers."""
