"""The protocol's messages in proto2 notation, and the tables that the codec makes from them.

Only messages and fields that this client writes or reads are listed; others are skipped. Enumerations are listed as
int32, because they are encoded like int32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SCHEMA = """
message KeyValue { required string key = 1; required string value = 2; }

message MessageIdData {
  required uint64 ledger_id = 1;
  required uint64 entry_id = 2;
  optional int32 partition = 3;
  optional int32 batch_index = 4;
  repeated int64 ack_set = 5;
  optional int32 batch_size = 6;
  optional MessageIdData first_chunk_message_id = 7;
}

message FeatureFlags {
  optional bool supports_auth_refresh = 1;
}

message AuthData { optional string auth_method_name = 1; optional bytes auth_data = 2; }

message CommandConnect {
  required string client_version = 1;
  optional bytes auth_data = 3;
  optional int32 protocol_version = 4;
  optional string auth_method_name = 5;
  optional string proxy_to_broker_url = 6;
  optional FeatureFlags feature_flags = 10;
}

message CommandConnected {
  required string server_version = 1;
  optional int32 protocol_version = 2;
  optional int32 max_message_size = 3;
}

message CommandAuthChallenge {
  optional string server_version = 1;
  optional AuthData challenge = 2;
  optional int32 protocol_version = 3;
}

message CommandAuthResponse {
  optional string client_version = 1;
  optional AuthData response = 2;
  optional int32 protocol_version = 3;
}

message CommandSuccess { required uint64 request_id = 1; }

message CommandError { required uint64 request_id = 1; required int32 error = 2; required string message = 3; }

message CommandPing { }

message CommandPong { }

message CommandPartitionedTopicMetadata {
  required string topic = 1;
  required uint64 request_id = 2;
  optional bool metadata_auto_creation_enabled = 6;
}

message CommandPartitionedTopicMetadataResponse {
  optional uint32 partitions = 1;
  required uint64 request_id = 2;
  optional int32 response = 3;
  optional int32 error = 4;
  optional string message = 5;
}

message CommandLookupTopic {
  required string topic = 1;
  required uint64 request_id = 2;
  optional bool authoritative = 3;
  optional string advertised_listener_name = 7;
}

message CommandLookupTopicResponse {
  optional string broker_service_url = 1;
  optional string broker_service_url_tls = 2;
  optional int32 response = 3;
  required uint64 request_id = 4;
  optional bool authoritative = 5;
  optional int32 error = 6;
  optional string message = 7;
  optional bool proxy_through_service_url = 8;
}

message CommandGetTopicsOfNamespace {
  required uint64 request_id = 1;
  required string namespace = 2;
  optional int32 mode = 3;
}

message CommandGetTopicsOfNamespaceResponse { required uint64 request_id = 1; repeated string topics = 2; }

message CommandTopicMigrated {
  required uint64 resource_id = 1;
  required int32 resource_type = 2;
  optional string broker_service_url = 3;
  optional string broker_service_url_tls = 4;
}

message CommandProducer {
  required string topic = 1;
  required uint64 producer_id = 2;
  required uint64 request_id = 3;
  optional string producer_name = 4;
  optional uint64 epoch = 8;
  optional bool user_provided_producer_name = 9;
  optional int32 producer_access_mode = 10;
  optional uint64 topic_epoch = 11;
  optional bool txn_enabled = 12;
}

message CommandProducerSuccess {
  required uint64 request_id = 1;
  required string producer_name = 2;
  optional int64 last_sequence_id = 3;
  optional uint64 topic_epoch = 5;
  optional bool producer_ready = 6;
}

message CommandSend {
  required uint64 producer_id = 1;
  required uint64 sequence_id = 2;
  optional int32 num_messages = 3;
  optional uint64 txnid_least_bits = 4;
  optional uint64 txnid_most_bits = 5;
  optional uint64 highest_sequence_id = 6;
}

message CommandSendReceipt {
  required uint64 producer_id = 1;
  required uint64 sequence_id = 2;
  optional MessageIdData message_id = 3;
  optional uint64 highest_sequence_id = 4;
}

message CommandSendError {
  required uint64 producer_id = 1;
  required uint64 sequence_id = 2;
  required int32 error = 3;
  required string message = 4;
}

message CommandCloseProducer {
  required uint64 producer_id = 1;
  required uint64 request_id = 2;
}

message CommandCloseConsumer {
  required uint64 consumer_id = 1;
  required uint64 request_id = 2;
}

message KeySharedMeta { required int32 key_shared_mode = 1; }

message CommandSubscribe {
  required string topic = 1;
  required string subscription = 2;
  required int32 sub_type = 3;
  required uint64 consumer_id = 4;
  required uint64 request_id = 5;
  optional string consumer_name = 6;
  optional bool durable = 8;
  optional MessageIdData start_message_id = 9;
  optional int32 initial_position = 13;
  optional bool force_topic_creation = 15;
  optional KeySharedMeta key_shared_meta = 17;
  optional uint64 consumer_epoch = 19;
}

message CommandFlow { required uint64 consumer_id = 1; required uint32 message_permits = 2; }

message CommandMessage {
  required uint64 consumer_id = 1;
  required MessageIdData message_id = 2;
  optional uint32 redelivery_count = 3;
  repeated int64 ack_set = 4;
  optional uint64 consumer_epoch = 5;
}

message CommandAck {
  required uint64 consumer_id = 1;
  required int32 ack_type = 2;
  repeated MessageIdData message_id = 3;
  optional uint64 txnid_least_bits = 6;
  optional uint64 txnid_most_bits = 7;
  optional uint64 request_id = 8;
}

message CommandAckResponse {
  required uint64 consumer_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  optional int32 error = 4;
  optional string message = 5;
  optional uint64 request_id = 6;
}

message CommandRedeliverUnacknowledgedMessages {
  required uint64 consumer_id = 1;
  repeated MessageIdData message_ids = 2;
  optional uint64 consumer_epoch = 3;
}

message CommandUnsubscribe {
  required uint64 consumer_id = 1;
  required uint64 request_id = 2;
}

message CommandSeek {
  required uint64 consumer_id = 1;
  required uint64 request_id = 2;
  optional MessageIdData message_id = 3;
}

message CommandActiveConsumerChange { required uint64 consumer_id = 1; optional bool is_active = 2; }

message CommandGetLastMessageId { required uint64 consumer_id = 1; required uint64 request_id = 2; }

message CommandGetLastMessageIdResponse {
  required MessageIdData last_message_id = 1;
  required uint64 request_id = 2;
  optional MessageIdData consumer_mark_delete_position = 3;
}

message CommandTcClientConnectRequest { required uint64 request_id = 1; required uint64 tc_id = 2; }

message CommandTcClientConnectResponse {
  required uint64 request_id = 1;
  optional int32 error = 2;
  optional string message = 3;
}

message CommandNewTxn {
  required uint64 request_id = 1;
  optional uint64 txn_ttl_seconds = 2;
  optional uint64 tc_id = 3;
}

message Subscription { required string topic = 1; required string subscription = 2; }

message CommandAddPartitionToTxn {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  repeated string partitions = 4;
}

message CommandAddSubscriptionToTxn {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  repeated Subscription subscription = 4;
}

message CommandEndTxn {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  optional int32 txn_action = 4;
}

message CommandEndTxnOnPartition {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  optional string topic = 4;
  optional int32 txn_action = 5;
  optional uint64 txnid_least_bits_of_low_watermark = 6;
}

message CommandEndTxnOnSubscription {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  optional Subscription subscription = 4;
  optional int32 txn_action = 5;
  optional uint64 txnid_least_bits_of_low_watermark = 6;
}

message TxnResponse {
  required uint64 request_id = 1;
  optional uint64 txnid_least_bits = 2;
  optional uint64 txnid_most_bits = 3;
  optional int32 error = 4;
  optional string message = 5;
}

message EncryptionKeys { required string key = 1; required bytes value = 2; repeated KeyValue metadata = 3; }

message MessageMetadata {
  required string producer_name = 1;
  required uint64 sequence_id = 2;
  required uint64 publish_time = 3;
  repeated KeyValue properties = 4;
  optional string partition_key = 6;
  optional int32 compression = 8;
  optional uint32 uncompressed_size = 9;
  optional int32 num_messages_in_batch = 11;
  optional uint64 event_time = 12;
  repeated EncryptionKeys encryption_keys = 13;
  optional bool partition_key_b64_encoded = 17;
  optional int32 marker_type = 20;
  optional uint64 txnid_least_bits = 22;
  optional uint64 txnid_most_bits = 23;
  optional uint64 highest_sequence_id = 24;
  optional bool null_value = 25;
  optional string uuid = 26;
  optional int32 num_chunks_from_msg = 27;
  optional int32 total_chunk_msg_size = 28;
  optional int32 chunk_id = 29;
  optional bool null_partition_key = 30;
}

message SingleMessageMetadata {
  repeated KeyValue properties = 1;
  optional string partition_key = 2;
  required int32 payload_size = 3;
  optional bool compacted_out = 4;
  optional uint64 event_time = 5;
  optional bool partition_key_b64_encoded = 6;
  optional bool null_value = 9;
  optional bool null_partition_key = 10;
}

message BaseCommand {
  required int32 type = 1;
  optional CommandConnect connect = 2;
  optional CommandConnected connected = 3;
  optional CommandSubscribe subscribe = 4;
  optional CommandProducer producer = 5;
  optional CommandSend send = 6;
  optional CommandSendReceipt send_receipt = 7;
  optional CommandSendError send_error = 8;
  optional CommandMessage message = 9;
  optional CommandAck ack = 10;
  optional CommandFlow flow = 11;
  optional CommandUnsubscribe unsubscribe = 12;
  optional CommandSuccess success = 13;
  optional CommandError error = 14;
  optional CommandCloseProducer close_producer = 15;
  optional CommandCloseConsumer close_consumer = 16;
  optional CommandProducerSuccess producer_success = 17;
  optional CommandPing ping = 18;
  optional CommandPong pong = 19;
  optional CommandRedeliverUnacknowledgedMessages redeliver = 20;
  optional CommandPartitionedTopicMetadata partition_metadata = 21;
  optional CommandPartitionedTopicMetadataResponse partition_metadata_response = 22;
  optional CommandLookupTopic lookup = 23;
  optional CommandLookupTopicResponse lookup_response = 24;
  optional CommandSeek seek = 28;
  optional CommandGetLastMessageId get_last_message_id = 29;
  optional CommandGetLastMessageIdResponse get_last_message_id_response = 30;
  optional CommandActiveConsumerChange active_consumer_change = 31;
  optional CommandGetTopicsOfNamespace get_topics_of_namespace = 32;
  optional CommandGetTopicsOfNamespaceResponse get_topics_of_namespace_response = 33;
  optional CommandAuthChallenge auth_challenge = 36;
  optional CommandAuthResponse auth_response = 37;
  optional CommandAckResponse ack_response = 38;
  optional CommandNewTxn new_txn = 50;
  optional TxnResponse new_txn_response = 51;
  optional CommandAddPartitionToTxn add_partition_to_txn = 52;
  optional TxnResponse add_partition_to_txn_response = 53;
  optional CommandAddSubscriptionToTxn add_subscription_to_txn = 54;
  optional TxnResponse add_subscription_to_txn_response = 55;
  optional CommandEndTxn end_txn = 56;
  optional TxnResponse end_txn_response = 57;
  optional CommandEndTxnOnPartition end_txn_on_partition = 58;
  optional TxnResponse end_txn_on_partition_response = 59;
  optional CommandEndTxnOnSubscription end_txn_on_subscription = 60;
  optional TxnResponse end_txn_on_subscription_response = 61;
  optional CommandTcClientConnectRequest tc_client_connect_request = 62;
  optional CommandTcClientConnectResponse tc_client_connect_response = 63;
  optional CommandTopicMigrated topic_migrated = 68;
}
"""


@dataclass(frozen=True)
class Field:
    """A field of a Protocol Buffers message. `type` is the name of a scalar type or of another message."""

    label: str
    type: str
    name: str
    number: int


@dataclass
class MessageType:
    """The schema of one Protocol Buffers message: its fields in order, by name and by number."""

    name: str
    fields: tuple[Field, ...]
    by_name: dict[str, Field] = field(init=False)
    by_number: dict[int, Field] = field(init=False)
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {f.name: f for f in self.fields}
        self.by_number = {f.number: f for f in self.fields}
        self.required = frozenset(f.name for f in self.fields if f.label == "required")


def _parse(text: str) -> dict[str, MessageType]:
    types = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL):
        lines = re.findall(r"(required|optional|repeated) (\w+) (\w+) = (\d+);", body)
        fields = tuple(Field(label, type, field_name, int(number)) for label, type, field_name, number in lines)
        types[name] = MessageType(name, fields)
    return types


TYPES = _parse(SCHEMA)
# A command is one field of BaseCommand, whose number is also the command's type.
COMMANDS = {f.name: f.number for f in TYPES["BaseCommand"].fields if f.name != "type"}
