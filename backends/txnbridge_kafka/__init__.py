"""Apache Kafka: confluent-kafka for data, kafka-python for the requests that confluent-kafka lacks.

The parts of Kafka's model on which the guarantees of this backend depend:

- A transactional id belongs to a coordinator, which remembers the id's last transaction. Opening the id
  (InitProducerId) aborts an open transaction and raises the producer epoch, which fences older owners: `write.opening`,
  `write.writer`.
- A transaction begins at the coordinator with the first partition that is added to it, never earlier. From then on its
  start time distinguishes it from every other transaction of its id: `client.responses.TransactionDescription`, and the
  tokens in `outcome.outcome`.
- EndTxn makes the decision durable. Only then the coordinator writes control markers to each partition, and readers
  with `read_committed`, as all of ours are, wait at a partition until its marker is there. A broker that is killed
  between the two may forget markers, and the producer's next transaction in such a partition would include the messages
  of the previous one. So a writer begins its next transaction when the last is certainly complete
  (`client.coordinator_session`), and hanging transactions are found and ended (`outcome.hanging_transactions`,
  `outcome.hanging_transaction_monitor`).
- Any process that has the producer id and epoch of a transactional id may end its transaction. So a prepared
  transaction is one that its writer leaves open while it drops the producer. Each has a transactional id that no other
  transaction uses meanwhile: `write.prepared`.
- The coordinator forgets a transaction when its id is opened again. An outcome that a token's holder may still ask for
  is recorded in the decision log before (`write.owner`). The coordinator's own topic is the last evidence
  (`outcome.transaction_state_log`).
- Acknowledgements are positions of a group, written in the transaction with a proof of membership: `write.acks`.

The path of a message: `broker` makes a `write.writer`, which gives the message to a `write.producer`. The commit waits
until every message is stored, sends the acknowledgements, and ends the transaction. `read.reader` takes the message
from its partition (`read.partition`), whose first offset `read.start_positions` has looked up. The path of a token:
`write.prepared` prepares its transaction, `outcome.outcome` ends it.

`cluster` holds the objects that all these modules share: the settings, the `topics`, and the protocol client
(`client`). `capabilities` and `backend` declare what is guaranteed, `settings` reads URLs and options, `decision_log`
keeps decision logs, `errors` translates the client's errors into ours, and `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_kafka.backend import KafkaBackend

    return [KafkaBackend()]
