"""What can go wrong between a client and RocketMQ, and whether the request may have had effect all the same.

Messages name codes, addresses and topics, and repeat what the broker remarked; never bodies, keys or secrets.
"""

from __future__ import annotations

from txnbridge_rocketmq.client.codes import WITHOUT_EFFECT, Answer


class RemotingError(Exception):
    """The root of all errors of this package.

    `may_have_had_effect` is False only where the request was certainly not carried out.
    """

    def __init__(self, message: str, *, may_have_had_effect: bool = False) -> None:
        super().__init__(message)
        self.may_have_had_effect = may_have_had_effect

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class Unreachable(RemotingError):
    """No connection came about, so nothing was sent."""


class ConnectionLost(RemotingError):
    """The connection ended before the answer came."""


class TimedOut(RemotingError):
    """The call's time was over before the answer came."""


class ProtocolViolation(RemotingError):
    """What came is not RocketMQ's protocol, or larger than this client takes; the connection is closed."""


class Refused(RemotingError):
    """The broker answered, and not with success.

    `code` is one of `Answer` or a number that this client does not know, `remark` the broker's own words.
    """

    def __init__(self, code: int, remark: str, what: str) -> None:
        super().__init__(
            f"{what}: {name_of(code)}{f', {remark}' if remark else ''}",
            may_have_had_effect=code not in WITHOUT_EFFECT,
        )
        self.code = code
        self.remark = remark


class NotDurable(Refused):
    """The message is stored, but was not flushed or replicated as the broker's settings ask.

    `offset_id` is its address, as in the answer to a message that is stored well.
    """

    def __init__(self, code: int, remark: str, what: str, offset_id: str) -> None:
        super().__init__(code, remark, what)
        self.offset_id = offset_id


class CannotDecompress(RemotingError):
    """A body is compressed in a way that this client does not read, or unpacks to more than it takes."""


def name_of(code: int) -> str:
    """An answer's code as text."""
    try:
        return f"{Answer(code).name} ({code})"
    except ValueError:
        return f"answer {code}"


def _rebuild(cls: type[RemotingError], args: tuple[object, ...], state: dict[str, object]) -> RemotingError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
