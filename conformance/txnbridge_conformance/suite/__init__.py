"""The tests that a backend must pass: `from txnbridge_conformance.suite import *` in one test module.

The tests use the public interface only, and each proves one guarantee. If a broker cannot pass a test, its backend
declares the test's capability absent, or the contract gets a new capability; the test is not changed.
"""

from txnbridge_conformance.suite.administering import *
from txnbridge_conformance.suite.consuming import *
from txnbridge_conformance.suite.decision_log import *
from txnbridge_conformance.suite.fencing import *
from txnbridge_conformance.suite.half_messages import *
from txnbridge_conformance.suite.kill_walks import *
from txnbridge_conformance.suite.messages import *
from txnbridge_conformance.suite.preparing import *
from txnbridge_conformance.suite.publishing import *
from txnbridge_conformance.suite.transactions import *
