"""Names of topics and groups, and the encoding of any text as part of such a name."""

from __future__ import annotations

from urllib.parse import quote, unquote

from txnbridge.errors import InvalidOption
from txnbridge_rocketmq.client.protocol.send_requests import check_group, check_topic

# RocketMQ's system topics and groups.
_SYSTEM = ("RMQ_SYS_", "SCHEDULE_TOPIC_", "%RETRY%", "%DLQ%", "rmq_sys_", "CID_RMQ_SYS_")
_SYSTEM_TOPICS = {"TBW102", "BenchmarkTest", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "TRANS_CHECK_MAX_TIME_TOPIC"}


def encoded(text: str) -> str:
    """Encode any text, reversibly, in the characters that names may have. '%' and two digits encode a byte."""
    return quote(text, safe="", errors="surrogatepass").replace(".", "%2E").replace("~", "%7E")


def decoded(text: str) -> str:
    """Return the text of a name that `encoded` gave, and any other name as it is."""
    try:
        return unquote(text, errors="surrogatepass")
    except UnicodeDecodeError:
        return text


def topic_name(name: str) -> str:
    try:
        return check_topic(name)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def group_name(name: str) -> str:
    try:
        return check_group(name)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def is_system_topic(name: str) -> bool:
    """Return whether a topic belongs to RocketMQ itself: system topics, and retry and dead-letter topics."""
    return name.startswith(_SYSTEM) or name in _SYSTEM_TOPICS
