"""Kafka's protocol as bytes: the requests that are sent here, and how their fields are written and read.

Each request has a version that Kafka has had since 3.0, in the flexible encoding, in which fields that are not known
here can be skipped. Some have an older version too, in the classic encoding, for other brokers of this protocol.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

# The name of a primitive type, the fields of a structure, or one of these in a list of one, for an array.
Kind: TypeAlias = "str | Mapping[str, Kind] | list[Kind]"

_NUMBERS = {"bool": ">?", "i8": ">b", "i16": ">h", "i32": ">i", "i64": ">q"}
_LONGEST_LENGTH = 5  # bytes of an encoded length
_CLASSIC_LENGTHS = {"str": ">h", "bytes": ">i"}


class Request(NamedTuple):
    api: Api
    values: Mapping[str, Any]


class Form(NamedTuple):
    """The fields of a request in one version, and those of its answer."""

    fields: Kind
    answer: Kind
    classic: bool


@dataclass(frozen=True, eq=False)
class Api:
    """A kind of request, such as EndTxn, and its versions that are used here."""

    name: str
    key: int
    forms: dict[int, Form]  # by version

    def __call__(self, **values: Any) -> Request:
        return Request(self, values)

    def frame(self, version: int, number: int, client: str, values: Mapping[str, Any]) -> bytes:
        form, name, body = self.forms[version], client.encode(), bytearray()
        if not form.classic:
            body.append(0)  # no tagged fields of the header
        _write(body, form.fields, values, form.classic)
        head = struct.pack(f">hhih{len(name)}s", self.key, version, number, len(name), name)
        return struct.pack(">i", len(head) + len(body)) + head + body

    def answer(self, version: int, number: int, frame: bytes) -> Any:
        """Return an answer's fields as attributes. Raise `ValueError` or `struct.error` if it cannot be read.

        `number` is the request's correlation id, and `version` the version in which the request was sent.
        """
        if struct.unpack_from(">i", frame) != (number,):
            raise ValueError("the answer is to another request")
        form = self.forms[version]
        reader = Reader(frame, form.classic, 4)
        if not form.classic and self is not API_VERSIONS:
            reader.read({})  # tagged fields of the header
        return reader.read(form.answer)


def _write(out: bytearray, kind: Kind, value: Any, classic: bool) -> None:
    if isinstance(kind, Mapping):
        for name, each in kind.items():
            _write(out, each, value[name], classic)
        if not classic:
            out.append(0)  # no tagged fields
    elif isinstance(kind, list):
        _write_length(out, value, classic and ">i")
        for each in value or ():
            _write(out, kind[0], each, classic)
    elif kind == "uuid":
        out += value.bytes
    elif kind in ("str", "bytes"):
        data = value.encode() if isinstance(value, str) else value
        _write_length(out, data, classic and _CLASSIC_LENGTHS[kind])
        out += data or b""
    else:
        out += struct.pack(_NUMBERS[kind], value)


def _write_length(out: bytearray, value: Any, classic: str | Literal[False]) -> None:
    if classic:
        out += struct.pack(classic, -1 if value is None else len(value))
        return
    left = 0 if value is None else len(value) + 1
    while left > 0x7F:
        out.append(0x80 | left & 0x7F)
        left >>= 7
    out.append(left)


class Reader:
    """Reads an answer, or another structure. Each length is compared with the bytes that are left."""

    def __init__(self, data: bytes, classic: bool = False, at: int = 0) -> None:
        self._data = data
        self._classic = classic
        self._at = at

    def read(self, kind: Kind) -> Any:
        if isinstance(kind, Mapping):
            found = SimpleNamespace(**{name: self.read(each) for name, each in kind.items() if "@" not in name})
            if not self._classic:
                self._read_tagged_fields(kind, vars(found))
            return found
        if isinstance(kind, list):
            size = self._length(">i")
            return None if size is None else [self.read(kind[0]) for _ in range(size)]
        if kind == "uuid":
            return uuid.UUID(bytes=self._take(16))
        if kind in ("str", "bytes"):
            size = self._length(_CLASSIC_LENGTHS[kind])
            data = None if size is None else self._take(size)
            return data.decode() if data is not None and kind == "str" else data
        return struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))[0]

    def _read_tagged_fields(self, kind: Mapping[str, Kind], found: dict[str, Any]) -> None:
        """Read into `found` the tagged fields that `kind` has as "NUMBER@NAME", and skip all others."""
        wanted = {int(tag): (name, kind[field]) for field in kind for tag, _, name in [field.partition("@")] if name}
        found.update((name, None) for name, _ in wanted.values())
        for _ in range(self._varint()):
            tag, size = self._varint(), self._varint()
            data = self._take(size)
            if tag in wanted:
                name, each = wanted[tag]
                found[name] = Reader(data).read(each)

    def _length(self, classic: str) -> int | None:
        if self._classic:
            (size,) = struct.unpack(classic, self._take(struct.calcsize(classic)))
        else:
            size = self._varint() - 1
        if size > len(self._data) - self._at:
            raise ValueError("a length exceeds the answer")
        return None if size < 0 else size

    def _varint(self) -> int:
        number = 0
        for place in range(_LONGEST_LENGTH):
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number
        raise ValueError("a length is too long")

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) < size:
            raise ValueError("the answer ends early")
        self._at += size
        return data


def structure(text: str) -> Mapping[str, Kind]:
    """Return the fields of a structure, given as text: "name:str partitions:[index:i32 replicas:[i32]]"."""
    return _fields(re.findall(r"[\w@]+:|\[|\]|\w+", text)[::-1])


def _fields(tokens: list[str]) -> Mapping[str, Kind]:
    fields: dict[str, Kind] = {}
    while tokens and tokens[-1] != "]":
        name = tokens.pop().removesuffix(":")
        fields[name] = _kind(tokens)
    return fields


def _kind(tokens: list[str]) -> Kind:
    token = tokens.pop()
    if token != "[":
        return token
    element: Kind = _fields(tokens) if tokens[-1].endswith(":") else tokens.pop()
    tokens.pop()  # the closing bracket
    return [element]


# The requests: name, key and versions in a line, then the fields of the request and, behind "=", of the answer. "or"
# adds another version, with the same fields if none are given.
_TABLE = """
ApiVersions 18 3
    client_software_name:str client_software_version:str
  = error_code:i16 api_keys:[api_key:i16 min_version:i16 max_version:i16] throttle_time_ms:i32
    2@finalized_features:[name:str max_version_level:i16 min_version_level:i16]
SaslHandshake 17 1 classic
    mechanism:str
  = error_code:i16 mechanisms:[str]
SaslAuthenticate 36 2
    auth_bytes:bytes
  = error_code:i16 error_message:str auth_bytes:bytes session_lifetime_ms:i64
Metadata 3 11
    topics:[topic_id:uuid name:str] allow_auto_topic_creation:bool include_topic_authorized_operations:bool
  = throttle_time_ms:i32 brokers:[node_id:i32 host:str port:i32 rack:str] cluster_id:str controller_id:i32
    topics:[error_code:i16 name:str topic_id:uuid is_internal:bool partitions:[error_code:i16 partition_index:i32
    leader_id:i32 leader_epoch:i32 replica_nodes:[i32] isr_nodes:[i32] offline_replicas:[i32]]
    topic_authorized_operations:i32]
or 8 classic
    topics:[name:str] allow_auto_topic_creation:bool include_cluster_authorized_operations:bool
    include_topic_authorized_operations:bool
  = throttle_time_ms:i32 brokers:[node_id:i32 host:str port:i32 rack:str] cluster_id:str controller_id:i32
    topics:[error_code:i16 name:str is_internal:bool partitions:[error_code:i16 partition_index:i32
    leader_id:i32 leader_epoch:i32 replica_nodes:[i32] isr_nodes:[i32] offline_replicas:[i32]]
    topic_authorized_operations:i32] cluster_authorized_operations:i32
FindCoordinator 10 4
    key_type:i8 coordinator_keys:[str]
  = throttle_time_ms:i32 coordinators:[key:str node_id:i32 host:str port:i32 error_code:i16 error_message:str]
FindCoordinator 10 3
    key:str key_type:i8
  = throttle_time_ms:i32 error_code:i16 error_message:str node_id:i32 host:str port:i32
# 4 and 5 only add error codes, and 6 is another transaction protocol.
InitProducerId 22 3,4
    transactional_id:str transaction_timeout_ms:i32 producer_id:i64 producer_epoch:i16
  = throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16
EndTxn 26 3,4
    transactional_id:str producer_id:i64 producer_epoch:i16 committed:bool
  = throttle_time_ms:i32 error_code:i16
# The transaction protocol in which an end raises the producer epoch.
EndTxn 26 5
    transactional_id:str producer_id:i64 producer_epoch:i16 committed:bool
  = throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16
AddOffsetsToTxn 25 3
    transactional_id:str producer_id:i64 producer_epoch:i16 group_id:str
  = throttle_time_ms:i32 error_code:i16
or 1 classic
# The coordinator checks the group's member from 3 on; 5 belongs to another transaction protocol.
TxnOffsetCommit 28 3
    transactional_id:str group_id:str producer_id:i64 producer_epoch:i16 generation_id:i32 member_id:str
    group_instance_id:str topics:[name:str partitions:[partition_index:i32 committed_offset:i64
    committed_leader_epoch:i32 committed_metadata:str]]
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 error_code:i16]]
# 9 is needed for the group protocol "consumer"; 10 names topics by their ids.
OffsetCommit 8 8,9
    group_id:str generation_id:i32 member_id:str group_instance_id:str topics:[name:str partitions:[partition_index:i32
    committed_offset:i64 committed_leader_epoch:i32 committed_metadata:str]]
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 error_code:i16]]
or 7 classic
LeaveGroup 13 4
    group_id:str members:[member_id:str group_instance_id:str]
  = throttle_time_ms:i32 error_code:i16 members:[member_id:str group_instance_id:str error_code:i16]
or 3 classic
WriteTxnMarkers 27 1
    markers:[producer_id:i64 producer_epoch:i16 transaction_result:bool topics:[name:str partition_indexes:[i32]]
    coordinator_epoch:i32]
  = markers:[producer_id:i64 topics:[name:str partitions:[partition_index:i32 error_code:i16]]]
ListOffsets 2 6
    replica_id:i32 isolation_level:i8 topics:[name:str partitions:[partition_index:i32 current_leader_epoch:i32
    timestamp:i64]]
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 error_code:i16 timestamp:i64 offset:i64
    leader_epoch:i32]]
or 4 classic
OffsetForLeaderEpoch 23 4
    replica_id:i32 topics:[name:str partitions:[partition_index:i32 current_leader_epoch:i32 leader_epoch:i32]]
  = throttle_time_ms:i32 topics:[name:str partitions:[error_code:i16 partition_index:i32 leader_epoch:i32 offset:i64]]
or 3 classic
OffsetFetch 9 7
    group_id:str topics:[name:str partition_indexes:[i32]] require_stable:bool
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 committed_offset:i64
    committed_leader_epoch:i32 metadata:str error_code:i16]] error_code:i16
DescribeProducers 61 0
    topics:[name:str partition_indexes:[i32]]
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 error_code:i16 error_message:str
    active_producers:[producer_id:i64 producer_epoch:i32 last_sequence:i32 last_timestamp:i64 coordinator_epoch:i32
    current_txn_start_offset:i64]]]
DescribeTransactions 65 0
    transactional_ids:[str]
  = throttle_time_ms:i32 transaction_states:[error_code:i16 transactional_id:str transaction_state:str
    transaction_timeout_ms:i32 transaction_start_time_ms:i64 producer_id:i64 producer_epoch:i16 topics:[topic:str
    partitions:[i32]]]
ListTransactions 66 0
    state_filters:[str] producer_id_filters:[i64]
  = throttle_time_ms:i32 error_code:i16 unknown_state_filters:[str] transaction_states:[transactional_id:str
    producer_id:i64 transaction_state:str]
CreateTopics 19 6
    topics:[name:str num_partitions:i32 replication_factor:i16 assignments:[partition_index:i32 broker_ids:[i32]]
    configs:[name:str value:str]] timeout_ms:i32 validate_only:bool
  = throttle_time_ms:i32 topics:[name:str error_code:i16 error_message:str num_partitions:i32 replication_factor:i16
    configs:[name:str value:str read_only:bool config_source:i8 is_sensitive:bool]]
DeleteTopics 20 6
    topics:[name:str topic_id:uuid] timeout_ms:i32
  = throttle_time_ms:i32 responses:[name:str topic_id:uuid error_code:i16 error_message:str]
or 5
    topic_names:[str] timeout_ms:i32
  = throttle_time_ms:i32 responses:[name:str error_code:i16 error_message:str]
CreatePartitions 37 2,3
    topics:[name:str count:i32 assignments:[broker_ids:[i32]]] timeout_ms:i32 validate_only:bool
  = throttle_time_ms:i32 results:[name:str error_code:i16 error_message:str]
DescribeConfigs 32 4
    resources:[resource_type:i8 resource_name:str configuration_keys:[str]] include_synonyms:bool
    include_documentation:bool
  = throttle_time_ms:i32 results:[error_code:i16 error_message:str resource_type:i8 resource_name:str
    configs:[name:str value:str read_only:bool config_source:i8 is_sensitive:bool synonyms:[name:str value:str
    source:i8] config_type:i8 documentation:str]]
DeleteRecords 21 2
    topics:[name:str partitions:[partition_index:i32 offset:i64]] timeout_ms:i32
  = throttle_time_ms:i32 topics:[name:str partitions:[partition_index:i32 low_watermark:i64 error_code:i16]]
"""


def _apis() -> Iterator[Api]:
    lines = [line for line in _TABLE.splitlines() if not line.startswith("#")]
    api, form = Api("", 0, {}), Form({}, {}, False)
    for entry in re.split(r"\n(?=\w)", "\n".join(lines))[1:]:
        head, _, fields = entry.partition("\n")
        *name, versions = head.removesuffix(" classic").split()
        asked, _, answered = fields.partition("=")
        form = Form(structure(asked), structure(answered), False) if fields else form
        form = form._replace(classic=head.endswith(" classic"))
        if name != ["or"]:
            api = Api(name[0], int(name[1]), {})
            yield api
        api.forms.update(dict.fromkeys(map(int, versions.split(",")), form))


(
    API_VERSIONS,
    SASL_HANDSHAKE,
    SASL_AUTHENTICATE,
    METADATA,
    FIND_COORDINATOR,
    FIND_ONE_COORDINATOR,
    INIT_PRODUCER_ID,
    END_TXN,
    END_TXN_AND_BUMP,
    ADD_OFFSETS_TO_TXN,
    TXN_OFFSET_COMMIT,
    OFFSET_COMMIT,
    LEAVE_GROUP,
    WRITE_TXN_MARKERS,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
    OFFSET_FETCH,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    CREATE_PARTITIONS,
    DESCRIBE_CONFIGS,
    DELETE_RECORDS,
) = _apis()
