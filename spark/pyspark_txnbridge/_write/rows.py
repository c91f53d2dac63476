"""Turns a query's rows into messages. The columns are those of Spark's own Kafka sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from txnbridge import InvalidOption, Transaction

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger("txnbridge.spark")

_TEXT = "string or binary"
_HEADERS = "array<struct<key:string,value:binary>>"
_FINGERPRINT = (1 << 64) - 1


@dataclass
class RowTotals:
    """The totals of some rows. The fingerprint depends neither on the rows' order nor on the sink's option topic."""

    rows: int = 0
    bytes: int = 0
    fingerprint: int = 0
    topics: set[str] = field(default_factory=set)

    @property
    def sums(self) -> tuple[int, int, int]:
        return self.rows, self.bytes, self.fingerprint

    def add(self, other: RowTotals) -> None:
        self.rows += other.rows
        self.bytes += other.bytes
        self.fingerprint = (self.fingerprint + other.fingerprint) & _FINGERPRINT
        self.topics |= other.topics


def total(counted: Iterable[Any]) -> RowTotals:
    """Return the totals, without topics, of tasks' reports, of transactions, or of other totals."""
    found = RowTotals()
    for each in counted:
        found.add(RowTotals(each.rows, each.bytes, each.fingerprint))
    return found


@dataclass(frozen=True)
class Columns:
    """The columns of a query that the sink uses. By them the sink sends each row to its topic."""

    names: frozenset[str]
    topic: str | None

    @classmethod
    def of(cls, schema: StructType, topic: str | None, timestamps: bool = False) -> Columns:
        """Return the columns of a schema that the sink uses: not the column timestamp unless `timestamps` asks for it.

        Raise `InvalidOption` for a missing or wrongly typed column.
        """
        types = {field.name: field.dataType for field in schema.fields}
        # Spark's Kafka sink ignores this column. Retention would soon remove the copies of old rows.
        if not timestamps and types.pop("timestamp", None) is not None:
            _warn_of_ignored_timestamps()
        for name, (expected, fits) in _COLUMNS.items():
            if name in types and not fits(types[name]):
                kind = types[name].simpleString()
                raise InvalidOption(f"{name} attribute unsupported type {kind}. {name} must be a(n) {expected}")
        if "value" not in types:
            raise InvalidOption("Required attribute 'value' not found")
        if topic is None and "topic" not in types:
            raise InvalidOption(
                "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
            )
        return cls(frozenset(types.keys() & _COLUMNS.keys()), topic)

    def send(self, batch: pa.RecordBatch, txn: Transaction | None) -> RowTotals:
        """Send the rows in a transaction, in order for each topic, or only count them (None); return their totals."""
        values = _binary(batch.column("value"))
        keys = _binary(batch.column("key")) if "key" in self.names else None
        count = RowTotals(len(values), _size(batch, self.names), _fingerprint(values, keys, self._others(batch)))
        for topic, part in self._by_topic(batch):
            count.topics.add(topic)
            if txn is None:
                continue
            if part is batch:
                self._send(topic, batch, values, keys, txn)
            else:
                chosen = _binary(part.column("key")) if keys is not None else None
                self._send(topic, part, _binary(part.column("value")), chosen, txn)
        return count

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self.topic is not None:
            yield self.topic, batch
            return
        import pyarrow.compute as pc

        column = batch.column("topic")
        if column.null_count:
            raise InvalidOption("null topic present in the data. Use the topic option for setting a default topic.")
        topics = pc.unique(column).to_pylist()
        for topic in topics:
            yield topic, batch if len(topics) == 1 else batch.filter(pc.equal(column, topic))

    def _send(
        self,
        topic: str,
        batch: pa.RecordBatch,
        values: list[bytes | None],
        keys: list[bytes | None] | None,
        txn: Transaction,
    ) -> None:
        placed = {name for name in ("partition", "timestamp") if self._has(batch, name)}
        headers = _headers(batch.column("headers")) if self._has(batch, "headers") else None
        if placed:
            nothing = [None] * len(values)
            partitions = batch.column("partition").to_pylist() if "partition" in placed else nothing
            times = _milliseconds(batch.column("timestamp")) if "timestamp" in placed else nothing
            for value, key, header, partition, timestamp in zip(
                values, keys or nothing, headers or nothing, partitions, times, strict=True
            ):
                txn.send(topic, value, key=key, headers=header, partition=partition, timestamp=timestamp)
        elif headers is not None:
            txn.send_many(topic, zip(values, keys or [None] * len(values), headers, strict=True))
        elif keys is not None:
            txn.send_many(topic, list(zip(values, keys, strict=True)))
        else:
            txn.send_many(topic, values)

    def _others(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]] | None:
        """Return each row's fields besides key and value, for its fingerprint; None if no row has such a field."""
        columns = {
            "topic": lambda column: column.to_pylist(),
            "partition": lambda column: column.to_pylist(),
            "timestamp": _milliseconds,
            "headers": _headers,
        }
        fields = {
            name: read(batch.column(name))
            for name, read in columns.items()
            if self._has(batch, name) and not (name == "topic" and self.topic is not None)
        }
        nothing = [None] * batch.num_rows
        return zip(*(fields.get(name, nothing) for name in columns), strict=True) if fields else None

    def _has(self, batch: pa.RecordBatch, name: str) -> bool:
        return name in self.names and batch.column(name).null_count < batch.num_rows


@cache
def _warn_of_ignored_timestamps() -> None:
    _log.warning(
        "the column timestamp is ignored, as by Spark's Kafka sink: each message gets the time of its writing. With the"
        " option includeTimestamp=true the column is the message's time, and retention removes old rows at once"
    )


def _binary(column: Any) -> list[bytes | None]:
    import pyarrow as pa

    # A text column already holds UTF-8 bytes, so the cast decodes nothing.
    kind = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    return column.cast(kind).to_pylist()  # type: ignore[no-any-return]


def _size(batch: pa.RecordBatch, names: frozenset[str]) -> int:
    import pyarrow.compute as pc

    return sum(pc.sum(pc.binary_length(batch.column(name))).as_py() or 0 for name in names & {"key", "value"})


def _fingerprint(
    values: Sequence[bytes | None], keys: Sequence[bytes | None] | None, others: Iterable[tuple[Any, ...]] | None
) -> int:
    """Return the fingerprint of rows.

    For rows that have only key and value, `bridge.transaction(fingerprint=True)` has the same fingerprint. Decision
    logs keep fingerprints, and other processes compare their own fingerprints with the stored ones, so the algorithm
    must not change.
    """
    from xxhash import xxh3_64_intdigest as digest

    if None in values:
        values = [b"" if value is None else value for value in values]
    if keys is None and others is None:
        return sum(map(digest, values)) & _FINGERPRINT  # type: ignore[arg-type]
    seeds = [0 if key is None else digest(key) | 1 for key in keys or [None] * len(values)]
    if others is not None:
        seeds = [
            digest(ascii(row).encode(), seed) if any(each is not None for each in row) else seed
            for row, seed in zip(others, seeds, strict=True)
        ]
    return sum(map(digest, values, seeds)) & _FINGERPRINT  # type: ignore[arg-type]


def _headers(column: Any) -> list[list[tuple[str, bytes | None]] | None]:
    # An empty list of headers arrives at a reader as no headers.
    return [[_header(each) for each in row] if row else None for row in column.to_pylist()]


def _header(given: dict[str, Any] | None) -> tuple[str, bytes | None]:
    if given is None or given["key"] is None:
        raise InvalidOption(
            "the column headers holds a header that is null, or has a null key: a header needs a name, its value may be"
            " null. Leave such a header out: filter(headers, h -> h.key is not null)"
        )
    return given["key"], given["value"]


def _milliseconds(column: Any) -> list[int | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    found = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    return pc.if_else(pc.equal(found, -1), None, found).to_pylist()  # type: ignore[no-any-return]  # Kafka: no time


def _is(*kinds: str) -> Callable[[DataType], bool]:
    return lambda kind: kind.simpleString() in kinds


_COLUMNS: dict[str, tuple[str, Callable[[DataType], bool]]] = {
    "value": (_TEXT, _is("string", "binary")),
    "key": (_TEXT, _is("string", "binary")),
    "headers": (_HEADERS, lambda kind: kind.simpleString() == _HEADERS),
    "topic": ("string", _is("string")),
    "partition": ("int", _is("int")),
    "timestamp": ("timestamp", _is("timestamp")),
}
