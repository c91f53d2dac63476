"""Names: topics of our own, and any text as part of one."""

from __future__ import annotations

from urllib.parse import quote, unquote

from txnbridge.errors import InvalidOption
from txnbridge_rocketmq.client.sending import check_group, check_topic

# Topics and groups of RocketMQ's own.
_SYSTEM = ("RMQ_SYS_", "SCHEDULE_TOPIC_", "%RETRY%", "%DLQ%", "rmq_sys_", "CID_RMQ_SYS_")
_SYSTEM_TOPICS = {"TBW102", "BenchmarkTest", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "TRANS_CHECK_MAX_TIME_TOPIC"}


def encoded(text: str) -> str:
    """Any text as part of a name, one to one: letters, digits, '_', '-', and '%' with two digits."""
    return quote(text, safe="", errors="surrogatepass").replace(".", "%2E").replace("~", "%7E")


def decoded(text: str) -> str:
    """What was encoded so."""
    return unquote(text, errors="surrogatepass")


def topic_name(name: str) -> str:
    """The name, if a topic can have it. Raises `InvalidOption`."""
    try:
        return check_topic(name)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def group_name(name: str) -> str:
    """The name, if a group can have it. Raises `InvalidOption`."""
    try:
        return check_group(name)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def is_system_topic(name: str) -> bool:
    """Whether it is one of those that a broker makes for itself, or for groups that deliver again."""
    return name.startswith(_SYSTEM) or name in _SYSTEM_TOPICS
