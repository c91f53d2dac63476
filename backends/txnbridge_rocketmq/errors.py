"""Translation of the remoting client's errors to the bridge's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from txnbridge import errors
from txnbridge_rocketmq.client.errors import CannotDecompress, ErrorResponse, RemotingError, ResponseTimeout
from txnbridge_rocketmq.client.protocol.codes import ResponseCode

_REFUSALS: Mapping[int, type[errors.TxnBridgeError]] = {
    ResponseCode.NO_PERMISSION: errors.AccessDenied,
    ResponseCode.TOPIC_NOT_EXIST: errors.NotFound,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: errors.NotFound,
    ResponseCode.MESSAGE_ILLEGAL: errors.InvalidOption,
    ResponseCode.INVALID_PARAMETER: errors.InvalidOption,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: errors.NotSupported,
    ResponseCode.FLUSH_DISK_TIMEOUT: errors.StorageFailed,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: errors.StorageFailed,
    ResponseCode.SLAVE_NOT_AVAILABLE: errors.StorageFailed,
}
# The remark names a full disk also for other reasons, such as a replica that is no master. But it has the disk's use.
_FULL_DISK = re.compile(r": +(0[.,]9|1[.,])\d")


def translate(error: RemotingError, action: str) -> errors.TxnBridgeError:
    """Return txnbridge's error for the error of a request that decides nothing; `action` says what failed."""
    text = f"{action}: {error}"
    if isinstance(error, ResponseTimeout):
        return errors.DeadlineExceeded(text)
    if isinstance(error, CannotDecompress):
        return errors.NotSupported(text)
    if isinstance(error, ErrorResponse):
        if error.code == ResponseCode.SERVICE_NOT_AVAILABLE and _FULL_DISK.search(error.remark):
            return errors.StorageFailed(text)
        if error.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            text += ". Set the broker's autoCreateSubscriptionGroup=true, or create the group: mqadmin updateSubGroup"
        return _REFUSALS.get(error.code, errors.BrokerUnavailable)(text)
    return errors.BrokerUnavailable(text)


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Translate errors of the remoting client in the block into txnbridge's errors; `action` says what failed."""
    try:
        yield
    except RemotingError as error:
        raise translate(error, action) from error
