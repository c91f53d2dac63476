"""The remoting client's errors in our words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    NotSupported,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Answer

_REFUSALS: Mapping[int, type[TxnBridgeError]] = {
    Answer.NO_PERMISSION: AccessDenied,
    Answer.TOPIC_NOT_EXIST: NotFound,
    Answer.SUBSCRIPTION_GROUP_NOT_EXIST: NotFound,
    Answer.MESSAGE_ILLEGAL: InvalidOption,
    Answer.INVALID_PARAMETER: InvalidOption,
    Answer.REQUEST_CODE_NOT_SUPPORTED: NotSupported,
    Answer.FLUSH_DISK_TIMEOUT: StorageFailed,
    Answer.FLUSH_SLAVE_TIMEOUT: StorageFailed,
    Answer.SLAVE_NOT_AVAILABLE: StorageFailed,
}


def translate(error: remoting.RemotingError, what: str) -> TxnBridgeError:
    """An error of the remoting client as ours; `what` says what was being done. To be raised `from` the client's own.

    Right for calls that decide nothing about a transaction, and for reads.
    """
    text = f"{what}: {error}"
    if isinstance(error, remoting.TimedOut):
        return DeadlineExceeded(text)
    if isinstance(error, remoting.CannotDecompress):
        return NotSupported(text)
    if isinstance(error, remoting.Refused):
        if error.code == Answer.SERVICE_NOT_AVAILABLE and "disk" in error.remark:
            return StorageFailed(text)
        return _REFUSALS.get(error.code, BrokerUnavailable)(text)
    return BrokerUnavailable(text)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raises errors of the remoting client from inside as ours."""
    try:
        yield
    except remoting.RemotingError as error:
        raise translate(error, what) from error
