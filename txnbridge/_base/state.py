"""The states of a transaction."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The states of a transaction. Each transaction is used once: it begins OPEN and ends in one of the last three."""

    sentence: str

    OPEN = "open", "It takes messages and acknowledgements."
    FAILED = "failed", "A message could not be stored, or an acknowledgement failed; it can only be aborted."
    PREPARED = "prepared", "It is durable and invisible; any process ends it by its token."
    COMMITTING = "committing", "The broker has been asked to commit and has not answered yet."
    ABORTING = "aborting", "The broker has been asked to abort and has not answered yet."
    COMMITTED = "committed", "The broker has said that it is committed."
    ABORTED = "aborted", "It certainly has no effect."
    UNKNOWN = "unknown", "The broker was asked to end it and no answer came; its token tells later."

    def __new__(cls, name: str, sentence: str) -> State:
        member = object.__new__(cls)
        member._value_ = name
        member.sentence = sentence
        return member
