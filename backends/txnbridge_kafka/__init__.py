"""Apache Kafka: confluent-kafka for data, kafka-python for the requests that it lacks.

Kafka's model, as far as the promises stand on it:

- A transactional id belongs to a coordinator, which remembers its last transaction. Opening the id (InitProducerId)
  aborts what is open and raises the epoch, which shuts older owners out: `write.opening`, `write.writer`.
- A transaction begins at the coordinator with the first partition that is added to it, never earlier. From then on its
  start time tells it from every other one of its id: `wire.answers.Described`, tokens in `ends.endings`.
- EndTxn makes the decision durable. Only then the coordinator writes markers to each partition, and until a marker is
  there readers wait (`read_committed` is how all of ours read). A broker killed between the two may forget markers,
  and the producer's next transaction there would take in what the last one left. So a writer begins its next one when
  the last is certainly complete (`wire.line.Witness`), and what was forgotten is found and written (`ends.forgotten`,
  `ends.watch`).
- Any process may end a transaction of an id whose producer id and epoch it knows. So a prepared transaction is one that
  its writer leaves open and lets go of, each under an id that nothing else uses meanwhile: `write.prepared`.
- The coordinator forgets a transaction when its id is opened again. What a token may still be asked about is recorded
  in the decision log before (`owner`); behind that stands the coordinator's own topic (`ends.history`).
- Acknowledgements are positions of a group, written in the transaction with a proof of membership: `acks`.

A message: `broker` hands out a `write.writer`, which gives it to a `write.producer`; its commit makes sure that all is
stored, sends the acknowledgements, and ends. `read.reader` takes it from its partition's `read.cursor`, which
`read.starts` has told where to begin. A token: `write.prepared` makes its transaction, `ends.endings` ends it.

Each cluster is asked through what `cluster` holds together: raw requests and clients (`wire`), `topics`, `offsets`.
`backend` says what is promised, `settings` reads URLs and options, `log` keeps decision logs, and `administration` is
for people.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_kafka.backend import KafkaBackend

    return [KafkaBackend()]
