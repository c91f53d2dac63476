"""Tests of each broker in every run, of each kind of promise the one that would fail first: a test module imports all.

A call that only looks creates nothing.
"""

from collections.abc import Callable

import pytest
from txnbridge_conformance.plugin import Connect
from txnbridge_conformance.suite import (  # noqa: F401
    test_a_processor_passes_every_message_on_once,
    test_all_topics_and_partitions_of_a_committed_transaction_are_seen,
    test_another_process_ends_what_a_killed_one_prepared,
    test_half_messages_are_published_as_the_work_went_and_not_before,
    test_no_topic_or_partition_of_an_aborted_transaction_is_seen,
)

from txnbridge import NotFound


def test_a_read_of_a_missing_topic_creates_no_topic(connect: Connect, unique: Callable[[str], str]) -> None:
    bridge = connect(create_topics=1)
    missing = unique("missing")
    with pytest.raises(NotFound, match=missing):
        bridge.read(missing, limit=1)
    assert missing not in {topic.name for topic in bridge.admin.topics()}
