"""What can be asked, as values: a request knows how it is sent and how its answer is read.

The modules `sending`, `reading`, `groups` and `administration` make them; `Client.call` and `Client.submit` send them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from txnbridge_rocketmq.client.codes import Answer
from txnbridge_rocketmq.client.errors import ProtocolViolation, Refused
from txnbridge_rocketmq.client.frames import Command

T = TypeVar("T")

_SUCCESS = frozenset({int(Answer.SUCCESS)})
# For answers that `is_absent` tells apart.
OR_ABSENT = frozenset({int(Answer.SUCCESS), int(Answer.SYSTEM_ERROR)})


@dataclass(frozen=True)
class Request(Generic[T]):
    """One request. `what` names it in errors; `read` makes the result of an answer whose code is `accepted`."""

    what: str
    code: int
    read: Callable[[Command], T] = field(repr=False)
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)
    accepted: frozenset[int] = field(default=_SUCCESS, repr=False)

    def result(self, answer: Command) -> T:
        """What an answer says. Raises `Refused`, and `ProtocolViolation` if it cannot be read."""
        if answer.code not in self.accepted:
            raise Refused(answer.code, answer.remark, self.what)
        try:
            return self.read(answer)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, struct.error) as error:
            raise ProtocolViolation(
                f"{self.what}: the answer cannot be read: {type(error).__name__}", may_have_had_effect=True
            ) from None


def fields(**given: object) -> dict[str, str]:
    """Fields as they are sent: all are text, those that are None are left out."""
    return {name: text(value) for name, value in given.items() if value is not None}


def text(value: object) -> str:
    """A field's value as it is sent."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


def as_body(document: object) -> bytes:
    """A body in JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


def document(answer: Command) -> dict[str, Any]:
    """The JSON object in an answer's body."""
    read = json.loads(answer.body)
    if not isinstance(read, dict):
        raise TypeError("not an object")
    return read


def is_absent(answer: Command, words: str, what: str) -> bool:
    """Whether there is none of what was asked for: some answers say so by SYSTEM_ERROR and words. Raises `Refused`."""
    if answer.code == Answer.SUCCESS:
        return False
    if words in answer.remark:
        return True
    raise Refused(answer.code, answer.remark, what)


def nothing(answer: Command) -> None:
    """For answers whose code says it all."""
