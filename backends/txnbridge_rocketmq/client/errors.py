"""The errors of the client. Each error says whether its failed request may have had effect.

Error texts contain codes, addresses, topics and the broker's remark. They never contain bodies, keys or secrets.
"""

from __future__ import annotations

from txnbridge_rocketmq.client.protocol.codes import WITHOUT_EFFECT, ResponseCode


class RemotingError(Exception):
    """The base of the client's errors. `may_have_had_effect` is False if the request was certainly not carried out."""

    def __init__(self, message: str, *, may_have_had_effect: bool = False) -> None:
        super().__init__(message)
        self.may_have_had_effect = may_have_had_effect

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class Unreachable(RemotingError):
    """The client could not connect, so the request was not sent."""


class Disconnected(RemotingError):
    """The connection ended before the response arrived."""


class ResponseTimeout(RemotingError):
    """The call's deadline passed before the response arrived."""


class ProtocolViolation(RemotingError):
    """The peer sent data that is not RocketMQ's protocol, or is too large."""


class ErrorResponse(RemotingError):
    """The broker responded with an error.

    `code` is a `ResponseCode`, or a number that this client does not know. `remark` is the broker's own text.
    """

    def __init__(self, code: int, remark: str, action: str) -> None:
        super().__init__(
            f"{action}: {code_name(code)}{f', {remark}' if remark else ''}",
            may_have_had_effect=code not in WITHOUT_EFFECT,
        )
        self.code = code
        self.remark = remark


class NotDurable(ErrorResponse):
    """Raised if a message is stored, at `offset_id`, but not flushed or replicated as the broker's settings require."""

    def __init__(self, code: int, remark: str, action: str, offset_id: str) -> None:
        super().__init__(code, remark, action)
        self.offset_id = offset_id


class CannotDecompress(RemotingError):
    """Raised if a body is compressed with an unknown algorithm, or unpacks to more than the allowed size."""


def code_name(code: int) -> str:
    try:
        return f"{ResponseCode(code).name} ({code})"
    except ValueError:
        return f"response code {code}"


def _rebuild(cls: type[RemotingError], args: tuple[object, ...], state: dict[str, object]) -> RemotingError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
