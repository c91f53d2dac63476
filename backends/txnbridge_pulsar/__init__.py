"""Apache Pulsar, by a client of its binary protocol of our own (`wire`): the official one has no transactions.

Pulsar's model, as far as the promises stand on it:

- A coordinator gives each transaction a number. Topics and subscriptions are added to it before anything is sent or
  acknowledged there: the coordinator tells no other of the end. From then on `writer`, `outgoing`, `acks`.
- A topic's TransactionBuffer hides what is behind the first open transaction from every reader. END is decided at the
  coordinator and passed on to each topic. A message that arrives after that opens its transaction again on its topic:
  so a commit waits for every receipt, and what may come late is made to be refused (`refusal`, `repair`).
- A coordinator forgets what it has ended, and then answers the same for committed, aborted and never begun. So each
  transaction puts a record inside itself on a marker topic, which is read instead: `markers`, `endings`.
- Nobody owns a transaction. A transactional id is a fence topic that one process holds, on which each transaction is
  named before it writes, so that the next owner finds the ones that it has to end: `fence`, `notices`, `owner`. The
  decision log knows which topic that is, so that a deleted one is noticed: `lineage`.
- Acknowledgements in a transaction are kept by the subscription as pending until the end comes; aborted ones come again
  by themselves. The end may miss a topic that is being unloaded, and is then sent there again: `confirming`.
- After a restart of the brokers no time-out runs until a client has connected to the coordinators: `coordinators`.

- A broker forgets a publisher's name that nobody uses for hours, and its sequences with it: `sequences`.

A message: `broker` hands out a `writer`; `outgoing` gathers entries and counts receipts. A `reader` gets entries by one
of the `ways`, each partition through its `cursor`. A token: `prepared` makes its transaction, `endings` ends it.

`cluster` holds the ways to ask: the wire client, `topics`, and `rest` where an administrator's URL was given. `log`
keeps decision logs, `begun` what groups have begun to read, `tidying` clears up marker topics; `admin`, `listing` and
`doctor` are for people.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_pulsar.backend import PulsarBackend

    return [PulsarBackend()]
