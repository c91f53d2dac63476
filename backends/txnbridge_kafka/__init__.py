"""Apache Kafka: confluent-kafka for data, kafka-python for the requests that confluent-kafka lacks.

Kafka's model, as far as the promises stand on it:

- A transactional id belongs to a coordinator, which remembers the id's last transaction. Opening the id
  (InitProducerId) aborts what is open and raises the producer epoch, which fences older owners: `write.opening`,
  `write.writer`.
- A transaction begins at the coordinator with the first partition that is added to it, never earlier. From then on its
  start time tells it from every other transaction of its id: `client.responses.TransactionDescription`, and the tokens
  in `outcome.outcome`.
- EndTxn makes the decision durable. Only then the coordinator writes control markers to each partition, and readers
  with `read_committed`, as all of ours are, wait at a partition until its marker is there. A broker that is killed
  between the two may forget markers, and the producer's next transaction in such a partition would take in what the
  last one left there. So a writer begins its next transaction when the last is certainly complete
  (`client.coordinator_session`), and hanging transactions are found and ended (`outcome.hanging_transactions`,
  `outcome.hanging_transaction_monitor`).
- Any process that knows an id's producer id and epoch may end its transaction. So a prepared transaction is one that
  its writer leaves open and lets go of, each under an id that nothing else uses meanwhile: `write.prepared`.
- The coordinator forgets a transaction when its id is opened again. What a token may still be asked about is recorded
  in the decision log before (`write.owner`). The coordinator's own topic is the last evidence
  (`outcome.transaction_state_log`).
- Acknowledgements are positions of a group, written in the transaction with a proof of membership: `write.acks`.

The way of a message: `broker` makes a `write.writer`, which gives the message to a `write.producer`. The commit makes
sure that everything is stored, sends the acknowledgements, and ends the transaction. `read.reader` takes the message
from its partition (`read.partition`), whose start `read.start_positions` has found. The way of a token:
`write.prepared` prepares its transaction, `outcome.outcome` ends it.

`cluster` holds what all of them share: the settings, the `topics`, and the protocol client (`client`). `capabilities`
and `backend` say what is promised, `settings` reads URLs and options, `decision_log` keeps decision logs, `errors` puts
the client's errors in our words, and `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_kafka.backend import KafkaBackend

    return [KafkaBackend()]
