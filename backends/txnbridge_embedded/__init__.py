"""The embedded broker: topics, groups and transactions in one SQLite file, shared by the processes of a machine.

How one file keeps the promises:

- A transaction waits in its writer's memory. Its commit stores its messages and acknowledgements in one write
  transaction of SQLite, so all of them are stored or none, whenever the process dies: `write.writer`,
  `write.staged_messages`, `write.acks`.
- A prepared transaction, and one larger than the memory, is in the file before its end, undecided: readers stop in
  front of it. The decision about it is one small write: `outcome.outcome`.
- Opening a transactional id raises its epoch, which every write checks: this fences older owners. Each writer leaves
  evidence of its last commit, by which a lost answer is found out: `outcome.writer_evidence`.
- No process runs in the background. Readers and administrators end transactions that are overdue.
- Members of a group share partitions by leases, which their threads renew: `read.group_members`, `read.rebalance`. A
  member reads its partitions in order (`read.ordered`); members that share messages lease each message (`read.shared`).

The way of a message: `write.writer` puts it into `write.staged_messages`, which stores it under a number made of its
partition and its offset (`client.schema`). `read.base_reader` wakes up by `client.change_notification`, finds how far
each partition can be read (`client.visibility`), and hands out the messages that its `read.partition` has not had.

`client` is the file, its locks and its turns. `backend` reads URLs, `capabilities` takes away what another broker lacks
(`like=`), `decision_log` and `half_store` keep decisions and half messages, `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_embedded.backend import EmbeddedBackend

    return [EmbeddedBackend()]
