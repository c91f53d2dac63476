"""Kafka passes the whole suite."""

from txnbridge_conformance.suite import *  # noqa: F403
