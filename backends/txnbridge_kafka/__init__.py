"""Apache Kafka: confluent-kafka for data, and raw requests for what confluent-kafka lacks.

The parts of Kafka's model on which the guarantees of this backend depend:

- A transactional id belongs to a coordinator. The coordinator remembers only the last transaction of the id. Opening
  the id (InitProducerId) aborts its open transaction and raises the producer epoch, so older owners are fenced:
  `write.opening`, `write.writer`.
- A transaction begins at the coordinator with the first partition that is added to it, never earlier. From then on its
  start time distinguishes it from every other transaction of its id: `client.protocol_types.TransactionDescription`,
  and the tokens in `outcome.outcome`.
- EndTxn makes the decision durable. Then the coordinator writes a control marker to each partition. A reader with
  `read_committed`, as all of ours are, waits in a partition until the marker is written. A broker that is killed before
  it has written a marker may never write it, and the producer's next transaction in that partition would include the
  messages of the last one. So a writer begins a transaction only when the last one is certainly complete
  (`client.marker_proof`), and hanging transactions, which have ended at their coordinator and lack a marker in
  a partition, are found and ended (`outcome.hanging_transactions`).
- Any process that has the producer id and epoch of a transactional id may end its transaction. So a writer prepares a
  transaction by leaving it open and freeing its producer. Until the transaction is ended, no other transaction uses its
  transactional id: `write.prepared`.
- The coordinator forgets a transaction when its id is opened again. If somebody with its token may still ask for its
  outcome, the outcome is first recorded in the id's ledger, a part of the application's decision log (`write.owner`).
  The topic __transaction_state is the last evidence (`outcome.transaction_state_log`).
- Acknowledgements are committed offsets of a group, written in the transaction with the member's id and generation:
  `write.acks`.

The path of a message: `broker` makes a `write.writer`, which gives the message to a `write.producer`. The commit waits
until every message is stored, sends the acknowledgements, and ends the transaction. `read.start_positions` looks up the
first offset of a partition, and `read.reader` reads the message from there (`read.partition`). The path of a token:
`write.prepared` prepares its transaction, `outcome.outcome` ends it.

`cluster` holds the objects that all modules share: the settings, the `topics`, and the protocol client
(`client`). `capabilities` and `backend` declare what is guaranteed, `settings` reads URLs and options, `decision_log`
keeps decision logs, `errors` translates the client's errors into ours, and `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_kafka.backend import KafkaBackend

    return [KafkaBackend()]
