"""Tasks of an event loop on Kafka."""

from tests.live_aio import test_transactions_of_many_tasks_are_whole_and_told_as_they_ended  # noqa: F401
