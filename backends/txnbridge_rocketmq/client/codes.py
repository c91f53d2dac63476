"""The numbers of the protocol: what is asked, what is answered, and the flags of a message."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Requests, by the names that RocketMQ gives them."""

    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    VIEW_MESSAGE_BY_ID = 33
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
    DELETE_SUBSCRIPTION_GROUP = 207
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAME_SERVER = 216
    GET_CONSUMER_RUNNING_INFO = 307
    SEND_MESSAGE_V2 = 310
    QUERY_CONSUME_QUEUE = 321
    RESUME_CHECK_HALF_MESSAGE = 323
    GET_TOPIC_CONFIG = 351


class Answer(IntEnum):
    """Answers' codes, by the names that RocketMQ gives them."""

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


# Answers after which the request was certainly not carried out. SYSTEM_ERROR is not among them: brokers also say it
# where something failed on the way. The three that follow a stored message are not either.
WITHOUT_EFFECT = frozenset(
    {
        Answer.SYSTEM_BUSY,
        Answer.REQUEST_CODE_NOT_SUPPORTED,
        Answer.MESSAGE_ILLEGAL,
        Answer.SERVICE_NOT_AVAILABLE,
        Answer.NO_PERMISSION,
        Answer.TOPIC_NOT_EXIST,
        Answer.PULL_NOT_FOUND,
        Answer.PULL_RETRY_IMMEDIATELY,
        Answer.PULL_OFFSET_MOVED,
        Answer.QUERY_NOT_FOUND,
        Answer.SUBSCRIPTION_GROUP_NOT_EXIST,
        Answer.INVALID_PARAMETER,
        Answer.FLOW_CONTROL,
        Answer.NOT_LEADER,
        Answer.ILLEGAL_OPERATION,
        Answer.GO_AWAY,
    }
)

# Answers to a message that was stored, but is not as safe as the broker's settings ask.
STORED_BUT = frozenset({Answer.FLUSH_DISK_TIMEOUT, Answer.SLAVE_NOT_AVAILABLE, Answer.FLUSH_SLAVE_TIMEOUT})


class Flag:
    """Bits of a message's system flag."""

    COMPRESSED = 0x1
    PREPARED = 0x4
    COMMITTED = 0x8
    ABORTED = 0xC  # both bits
    TRANSACTION = 0xC  # where the state of a transaction stands
    BORN_IPV6 = 0x10
    STORED_IPV6 = 0x20
    NEEDS_UNWRAPPING = 0x40
    INNER_BATCH = 0x80
    COMPRESSION = 0x700  # where the kind of compression stands; none means zlib, as old producers have it


class Property:
    """Names of properties that RocketMQ itself uses and this client needs."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    UNIQUE_KEY = "UNIQ_KEY"
    WAIT = "WAIT"
    HALF = "TRAN_MSG"
    GROUP = "PGROUP"
    REAL_TOPIC = "REAL_TOPIC"
    CHECKS = "TRANSACTION_CHECK_TIMES"
    IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    COPY_OF = "TRAN_PREPARED_QUEUE_OFFSET"


# The topics that a broker keeps for halves, and where it puts those that nobody answered for.
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
ROCKSDB_HALF_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
DISCARDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
