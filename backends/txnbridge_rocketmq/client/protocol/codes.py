"""The numbers of the protocol: request codes, response codes, and the flags of messages."""

from __future__ import annotations

from enum import IntEnum


class RequestCode(IntEnum):
    """Request codes, by RocketMQ's own names."""

    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ROUTE_INFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTION_GROUP = 200
    GET_PRODUCER_CONNECTION_LIST = 204
    GET_ALL_TOPIC_LIST_FROM_NAME_SERVER = 206
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAME_SERVER = 216
    GET_CONSUMER_RUNNING_INFO = 307
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    RESUME_CHECK_HALF_MESSAGE = 323
    GET_TOPIC_CONFIG = 351


class ResponseCode(IntEnum):
    """Response codes, by RocketMQ's own names."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    CONSUME_MSG_TIMEOUT = 207
    FLOW_CONTROL = 215
    NOT_LEADER = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500


# Response codes after which the request was certainly not carried out. SYSTEM_ERROR is not among them, because brokers
# also send it for a request that failed halfway. Nor are the codes in `STORED_NOT_DURABLE`.
WITHOUT_EFFECT = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.NOT_LEADER,
        ResponseCode.ILLEGAL_OPERATION,
        ResponseCode.GO_AWAY,
    }
)

# Response codes for a message that was stored, but not flushed or replicated as the broker's settings ask.
STORED_NOT_DURABLE = frozenset(
    {ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT}
)


class SystemFlag:
    """Bits of a message's system flag."""

    COMPRESSED = 0x1
    PREPARED = 0x4
    COMMITTED = 0x8
    ABORTED = 0xC  # both bits
    BORN_IPV6 = 0x10
    STORED_IPV6 = 0x20
    NEEDS_UNWRAPPING = 0x40
    INNER_BATCH = 0x80
    COMPRESSION = 0x700  # the mask of the compression type; zero means zlib, as old producers write it


class Property:
    """Names of those system properties of messages that this client uses."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    UNIQUE_KEY = "UNIQ_KEY"
    WAIT = "WAIT"
    MESSAGE_GROUP = "__SHARDINGKEY"  # the message group of gRPC clients, within which FIFO topics are in order
    HALF = "TRAN_MSG"
    GROUP = "PGROUP"  # the producer group
    REAL_TOPIC = "REAL_TOPIC"
    CHECKS = "TRANSACTION_CHECK_TIMES"
    IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    COPY_OF = "TRAN_PREPARED_QUEUE_OFFSET"


# The broker's topics for half messages, and the topic of half messages that were discarded after the last check-back.
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
ROCKSDB_HALF_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
DISCARDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
