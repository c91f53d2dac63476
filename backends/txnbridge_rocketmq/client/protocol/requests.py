"""`RpcRequest`: a request as a value, with its encoded fields and the function that decodes its response."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from txnbridge_rocketmq.client.errors import ErrorResponse, ProtocolViolation
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand

T = TypeVar("T")

_SUCCESS = frozenset({int(ResponseCode.SUCCESS)})
# The accepted codes of requests whose `read` calls `is_absent`.
OR_ABSENT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.SYSTEM_ERROR)})


@dataclass(frozen=True)
class RpcRequest(Generic[T]):
    """One request. `action` names it in errors; `read` decodes a response whose code is in `accepted` to the result."""

    action: str
    code: int
    read: Callable[[RemotingCommand], T] = field(repr=False)
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)
    accepted: frozenset[int] = field(default=_SUCCESS, repr=False)

    def result(self, answer: RemotingCommand) -> T:
        """Decode a response. Raise `ErrorResponse`, or `ProtocolViolation` if the response cannot be decoded."""
        if answer.code not in self.accepted:
            raise ErrorResponse(answer.code, answer.remark, self.action)
        try:
            return self.read(answer)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, struct.error) as error:
            raise ProtocolViolation(
                f"{self.action}: the answer cannot be read: {type(error).__name__}", may_have_had_effect=True
            ) from None


def fields(**given: object) -> dict[str, str]:
    """Return the header fields of a request as text, without fields whose value is None."""
    return {name: text(value) for name, value in given.items() if value is not None}


def text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


def as_body(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def document(answer: RemotingCommand) -> dict[str, Any]:
    read = json.loads(answer.body)
    if not isinstance(read, dict):
        raise TypeError("not an object")
    return read


def is_absent(answer: RemotingCommand, words: str, action: str) -> bool:
    """Return whether the broker answered, by SYSTEM_ERROR with these words, that the requested object is missing.

    Return False for a success. Raise `ErrorResponse` for another error.
    """
    if answer.code == ResponseCode.SUCCESS:
        return False
    if words in answer.remark:
        return True
    raise ErrorResponse(answer.code, answer.remark, action)


def nothing(answer: RemotingCommand) -> None:
    """Decode a response without contents: the `read` function of requests that only succeed or fail."""
