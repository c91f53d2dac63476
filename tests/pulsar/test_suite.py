"""Pulsar passes the whole suite."""

from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite import *  # noqa: F403
