"""The imports that children of the gate's tests need: the fork server of `Child` makes them once, and no child does.

A child that imports its test module takes up to 40 ms longer, and one that looks for installed plug-ins 13 ms.
"""

import gc
import importlib

from txnbridge import plugins

for name in (
    "sqlalchemy.dialects.sqlite",
    "tests.core.decisions.test_decisions_processes",
    "tests.core.half.test_half_messages",
    "tests.core.half.test_span",
    "tests.core.process.test_keep_order",
    "tests.core.process.test_processor_redrive",
    "tests.core.process.test_processor_retry",
    "tests.embedded.test_change_notification",
    "tests.embedded.test_durability",
    "tests.embedded.test_group_commit",
    "tests.embedded.test_takeovers",
    "tests.sql.test_barrier",
    "tests.sql.test_log",
    "tests.sql.test_outbox",
    "tests.sql.test_processing",
    "tests.sql.test_span",
):
    importlib.import_module(name)
assert plugins.backends()
gc.freeze()  # else a collection in a child copies the pages of all objects that it shares with the fork server
