"""Apache Pulsar, through our own client of its binary protocol: the official Python client has no transactions.

Pulsar's model, as far as our promises rest on it:

- A transaction coordinator gives each transaction its id. A topic or subscription is registered with the transaction
  before the first message or acknowledgement there, because the coordinator sends the transaction's end only to
  registered topics and subscriptions: `write/writer`, `write/batching`, `write/acks`.
- A topic's TransactionBuffer hides everything after the first open transaction from all readers. The coordinator
  decides the transaction's end and sends it to each topic. A message that arrives after the end opens its transaction
  again on its topic. So a commit waits for every receipt, and brokers are made to refuse late messages:
  `outcome/late_writes`.
- A coordinator forgets a transaction that has ended. Then it gives the same answer for committed, aborted and never
  begun transactions. So each transaction sends a proof message to a proof topic, from which the outcome is read later;
  by a presence record before it a reader notices that records were lost: `outcome/proof`, `outcome/outcome`.
  `outcome/in_doubt` keeps transactions whose proof cannot be read.
- Brokers know no owner of a transaction. The process that opened a transactional id last, its owner, holds the id's
  fence topic, an internal topic, exclusively, and names each transaction there before its first message, so that the
  next owner can end open transactions: `write/owner`, `write/fence`, `write/fence_records`. A record in the decision
  log shows whether a fence topic was deleted and created again: `FenceIdentity` in `write/owner`.
- A subscription keeps a transaction's acknowledgements as pending acks until the transaction's end arrives; after an
  abort the broker redelivers the messages. The end may miss one of the transaction's participants (its topics and
  subscriptions) that is being unloaded, so it is sent there again: `outcome/end_delivery`.
- After the death of its process a transaction may be open on a topic, although its coordinator has forgotten it. A
  reader of the topic finds its outcome and ends it there: `outcome/forgotten_transactions`.
- After a restart of the brokers no transaction times out before a client connects: `broker`.
- A broker forgets the sequences of a producer name that is unused for hours: `write/publisher`.

The packages: `client/` is the protocol client (imported as `wire`). `write/` sends, `read/` receives, `outcome/` ends
transactions and finds their outcomes, `admin/` serves administrators and has the client of the REST admin API.
`capabilities` declares the promises, `cluster` holds the clients and settings that all parts of a bridge share,
`decision_log` stores decision logs on topics.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_pulsar.backend import PulsarBackend

    return [PulsarBackend()]
