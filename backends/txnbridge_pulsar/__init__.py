"""Apache Pulsar, through our own client of its binary protocol: the official Python client has no transactions.

Pulsar's model, as far as our promises rest on it:

- A transaction coordinator (TC) numbers each transaction. Topics and subscriptions are registered with the transaction
  before the first message or acknowledgement, because the coordinator sends the end only to registered ones:
  `write/writer`, `write/batching`, `write/acks`.
- A topic's TransactionBuffer hides everything behind the first open transaction from all readers. The coordinator
  decides the end and passes it on to each topic. A message that arrives later opens its transaction again on its topic.
  So a commit waits for every receipt, and brokers are made to refuse late messages: `outcome/late_writes`.
- A coordinator forgets a transaction that has ended. Then it gives the same answer for committed, aborted and never
  begun ones. So each transaction sends a proof message to a proof topic, from which the outcome is read later:
  `outcome/proof`, `outcome/outcome`; `outcome/in_doubt` keeps transactions whose proof cannot be read.
- Brokers know no owner of a transaction. Our owner of a transactional id holds a fence topic and names each
  transaction there before its first message, so that the next owner can end open transactions: `write/owner`,
  `write/fence`, `write/fence_records`. By a record in the decision log a deleted fence topic is noticed:
  `write/fence_identity`.
- A subscription keeps acknowledgements of a transaction as pending acks until the end arrives, and delivers aborted
  ones again. An end may miss a topic that is being unloaded, and is then sent again: `outcome/end_delivery`.
- After a restart of the brokers no transaction times out before a client connects: `outcome/coordinator_keepalive`.
- A broker forgets the sequences of a producer name that is unused for hours: `write/sequences`.

The rooms: `client/` is the protocol client (imported as `wire`) and `rest`, for clusters with an `admin_url`. `write/`
sends, `read/` delivers, `outcome/` ends transactions and finds out how they ended, `admin/` serves administrators.
`capabilities` declares the promises, `cluster` holds the objects that all parts of a bridge share, `decision_log`
stores decision logs on topics.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_pulsar.backend import PulsarBackend

    return [PulsarBackend()]
