"""Exceptions from signal handlers that come into `poll` at any point: another consumer of the group loses nothing."""

from tests.interrupts import test_the_messages_of_an_interrupted_poll_come_to_the_next_consumer  # noqa: F401
