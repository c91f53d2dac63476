"""The embedded broker passes the whole conformance suite."""

from txnbridge_conformance.suite import *  # noqa: F403
