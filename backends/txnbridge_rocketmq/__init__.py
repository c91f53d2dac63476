"""Apache RocketMQ, spoken to by its remoting protocol (`remoting`), with the decision log as what decides.

RocketMQ's model, as far as the promises stand on it:

- The broker knows transactions of one message: a half, which nobody sees before it is ended, and which it publishes
  again each time that it is told to. A transaction here is many halves and one record in the application's decision
  log: that record is the commit, and what follows only carries it out. `writer`, `halves`, `endings`.
- So nothing can go back once it is decided, and readers may see some of it before the rest.
- An owner ends its fresh halves directly. Everybody else first looks whether the message is there: `ends`.
- What nobody has ended the broker asks about (check-back), any bridge whose producer group is the application. It is
  answered from the log and not at all while nothing is decided: `checks`, `members`.
- The first of all copies of a message is the message. Its place in the queue tells which: `repeats`, `fetching`.
- A group stands where the last decision that acknowledges ended. The log judges who was first on a partition, so nobody
  has to hold anything: `acks`, `starts`. Queues are shared out among readers only to spare work in vain: `sharing`.
- A topic has no id, but each record has a place of its own in the commit log. By that a queue is told from one that was
  made anew under its name: `anchors`.

A message: `broker` hands out a `writer`, `marks` says on it which transaction it belongs to and where that is decided.
A `reader` pulls it, each partition through its `cursor`. A token: the prepare record names its halves, `endings` ends
it.

`cluster` holds the ways to ask, `brokers` what brokers are set to, `naming` what tells one cluster from another, `log`
keeps decision logs; `listing`, `admin` and `doctor` are for people.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_rocketmq.backend import RocketMQBackend

    return [RocketMQBackend()]
