"""Apache Pulsar, through our own client of its binary protocol: the official Python client has no transactions.

Pulsar's model, as far as our promises rest on it:

- A transaction coordinator (TC) numbers each transaction. Topics and subscriptions are registered with the transaction
  before the first message or acknowledgement: the coordinator tells only registered ones of the end. Then come
  `write/writer`, `write/batching`, `write/acks`.
- A topic's TransactionBuffer hides everything behind the first open transaction from all readers. The coordinator
  decides the end and passes it on to each topic. A message that arrives later opens its transaction again on its topic.
  So a commit waits for every receipt, and brokers are made to refuse late messages: `outcome/late_writes`.
- A coordinator forgets a transaction that has ended. Then it gives the same answer for committed, aborted and never
  begun ones. So each transaction stores a proof message inside itself on a proof topic, which is read instead:
  `outcome/proof`, `outcome/outcome`; `outcome/in_doubt` keeps those whose proof cannot be read.
- Brokers know no owner of a transaction. Our owner of a transactional id holds a fence topic and names each transaction
  there before it writes, so that the next owner can end the open ones: `write/owner`, `write/fence`,
  `write/fence_records`. The decision log knows which topic it is, so a deleted one is noticed: `write/fence_identity`.
- A subscription keeps acknowledgements of a transaction as pending acks until the end arrives, and delivers aborted
  ones again. An end may miss a topic that is being unloaded, and is then sent there again: `outcome/end_delivery`.
- After a restart of the brokers no transaction times out before a client connects: `outcome/coordinator_keepalive`.
- A broker forgets the sequences of a producer name that is unused for hours: `write/sequences`.

The rooms: `client/` is the protocol client (imported as `wire`) and `rest`, for clusters with an `admin_url`. `write/`
sends, `read/` delivers, `outcome/` ends transactions and finds out how they ended, `admin/` is for people.
`capabilities` says what is promised, `cluster` is what the parts of a bridge share, `decision_log` keeps decision logs.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_pulsar.backend import PulsarBackend

    return [PulsarBackend()]
