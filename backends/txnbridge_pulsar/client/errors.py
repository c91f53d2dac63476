"""The client's errors. Their classes distinguish refusals, temporary errors and unknown results.

Every error says in `may_have_had_effect` whether the broker may have acted on the request; False means that it
certainly has not. Errors can be pickled, and contain no payloads, keys or credentials.
"""

from __future__ import annotations

import re
from enum import IntEnum


class ServerErrorCode(IntEnum):
    UNKNOWN = 0
    METADATA = 1
    PERSISTENCE = 2
    AUTHENTICATION = 3
    AUTHORIZATION = 4
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    QUOTA_EXCEEDED_ERROR = 7
    QUOTA_EXCEEDED_EXCEPTION = 8
    CHECKSUM = 9
    UNSUPPORTED_VERSION = 10
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOO_MANY_REQUESTS = 14
    TOPIC_TERMINATED = 15
    PRODUCER_BUSY = 16
    INVALID_TOPIC_NAME = 17
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN = 19
    COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED = 22
    TRANSACTION_CONFLICT = 23
    TRANSACTION_NOT_FOUND = 24
    PRODUCER_FENCED = 25


# Temporary errors of the broker's stores, load or ownership: the same request may succeed a moment later.
_TEMPORARY = {
    ServerErrorCode.UNKNOWN,
    ServerErrorCode.METADATA,
    ServerErrorCode.PERSISTENCE,
    ServerErrorCode.SERVICE_NOT_READY,
    ServerErrorCode.TOO_MANY_REQUESTS,
    ServerErrorCode.COORDINATOR_NOT_FOUND,
}


class PulsarError(Exception):
    """The base class of the client's errors."""

    may_have_had_effect = False
    # Whether a repeated request may succeed, judged by the error alone.
    retriable = False


class ConnectFailed(PulsarError):
    """No connection to the broker could be made, so no request was sent."""

    retriable = True


class BrokerConnectionLost(PulsarError):
    """The connection ended before the answer came, or before the request was sent; see `may_have_had_effect`."""

    retriable = True

    def __init__(self, text: str, may_have_had_effect: bool = True) -> None:
        super().__init__(text, may_have_had_effect)
        self.may_have_had_effect = may_have_had_effect

    def __str__(self) -> str:
        return str(self.args[0])


class RequestTimedOut(BrokerConnectionLost):
    """The answer did not arrive by the deadline. If it arrives later, it is ignored."""

    retriable = False


class Closed(PulsarError):
    """This process has closed the client, producer or consumer."""


class ProtocolError(PulsarError):
    """The broker violated the protocol; the connection is closed."""


class CorruptEntry(PulsarError):
    """A stored entry cannot be read: its checksum, compression or framing is wrong."""


class PerhapsDropped(PulsarError):
    """The entry may be stored or not: the broker could not store it, and dropped its repetition as a duplicate."""

    may_have_had_effect = True

    def __str__(self) -> str:
        return "an entry that the broker could not store was dropped as a duplicate when it was sent again"


class MessageTooLarge(PulsarError):
    """The entry is larger than the broker accepts; nothing was sent."""


class MissingLibrary(PulsarError):
    """A compression needs a package that is not installed."""


class ServerError(PulsarError):
    """The broker refused a request, with a code and a text. `server_error` makes the error of the matching subclass."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    @property
    def name(self) -> str:
        known = ServerErrorCode._value2member_map_.get(self.code)
        return f"code {self.code}" if known is None else known.name

    @property
    def retriable(self) -> bool:  # type: ignore[override]
        return self.code in _TEMPORARY

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


class ServiceNotReady(ServerError):
    """The broker does not serve this topic or coordinator now: a new lookup finds the broker that does."""


class NotAuthenticated(ServerError):
    """The broker refused the credentials."""


class NotAuthorized(ServerError):
    """The credentials are valid, but their role lacks a right."""


class NotOwner(NotAuthorized):
    """Another user began the transaction. Only this other user and superusers may end it."""


class TopicNotFound(ServerError):
    """The topic does not exist, and this request does not create it."""


class TopicTerminated(ServerError):
    """The topic accepts no messages any more."""


class ConsumerBusy(ServerError):
    """The exclusive subscription already has a consumer, or the subscription is of another type."""


class ProducerBusy(ServerError):
    """Another producer on the topic uses this name.

    While one producer takes over from another, this lasts only for a moment.
    """


class ProducerFenced(ServerError):
    """Another producer holds the topic exclusively, or has taken it over from this producer."""


class NotAllowed(ServerError):
    """The broker does not allow the request: transactions are off, or the transaction has ended on the topic."""


class CoordinatorNotFound(ServerError):
    """The broker does not run this transaction coordinator. The client has to connect to the coordinator again."""


class InvalidTransactionStatus(ServerError):
    """The transaction is not open. `state` is the broker's name for its state, or "" if the broker gives none."""

    @property
    def state(self) -> str:
        match = re.search(r"but it is in (\w+) status", self.text)
        return match[1] if match else ""


class TransactionNotFound(ServerError):
    """The coordinator does not know the transaction: it was committed, aborted, timed out, or never begun."""


class TransactionConflict(ServerError):
    """A message is already acknowledged, or an open transaction, perhaps the same one, has acknowledged it."""


_CLASSES: dict[int, type[ServerError]] = {
    ServerErrorCode.AUTHENTICATION: NotAuthenticated,
    ServerErrorCode.AUTHORIZATION: NotAuthorized,
    ServerErrorCode.CONSUMER_BUSY: ConsumerBusy,
    ServerErrorCode.SERVICE_NOT_READY: ServiceNotReady,
    ServerErrorCode.TOPIC_NOT_FOUND: TopicNotFound,
    ServerErrorCode.TOPIC_TERMINATED: TopicTerminated,
    ServerErrorCode.PRODUCER_BUSY: ProducerBusy,
    ServerErrorCode.PRODUCER_FENCED: ProducerFenced,
    ServerErrorCode.NOT_ALLOWED: NotAllowed,
    ServerErrorCode.COORDINATOR_NOT_FOUND: CoordinatorNotFound,
    ServerErrorCode.INVALID_TXN_STATUS: InvalidTransactionStatus,
    ServerErrorCode.TRANSACTION_NOT_FOUND: TransactionNotFound,
    ServerErrorCode.TRANSACTION_CONFLICT: TransactionConflict,
}


def server_error(code: int, text: str) -> ServerError:
    """Return the error for a broker's code and text. The code chooses the class."""
    # The code says that the transaction does not exist, and the text that it does.
    if code == ServerErrorCode.TRANSACTION_NOT_FOUND and "super user" in text:
        return (NotOwner if "neither the owner" in text else NotAuthorized)(code, text)
    return _CLASSES.get(code, ServerError)(code, text)
