"""The embedded broker: topics, groups and transactions in one SQLite file, shared by the processes of a machine.

How one file keeps the guarantees:

- A transaction's messages wait in its writer's memory. Its commit stores messages and acknowledgements in one write
  transaction of SQLite, so all of them are stored or none, whenever the process dies: `write.writer`,
  `write.staged_messages`, `write.acks`.
- A prepared transaction, and one larger than the memory, is stored in the file before its end, undecided: readers stop
  before its first message. The decision about the transaction is one small write: `outcome.outcome`.
- Opening a transactional id raises its epoch, which every write checks: this fences older owners. Each writer stores
  the number of its last commit, by which the outcome of a failed commit is found out: `outcome.writer_evidence`.
- No process runs in the background. Readers and administrators abort transactions whose deadline has passed.
- Members of a group share partitions by leases, which their threads renew: `read.group_members`, `read.rebalance`. A
  member reads its partitions in order (`read.ordered`); members that share messages lease each message (`read.shared`).

The path of a message: `write.writer` puts it into `write.staged_messages`, which stores it with a row id made of its
partition and its offset (`client.schema`). `read.base_reader` is woken by `client.change_notification`, reads up to
which offset each partition is readable (`client.visibility`), and hands out the messages after its `read.partition`.

`client` opens the file and orders its writers. `backend` reads URLs, `capabilities` has profiles of what other brokers
lack (`like=`), `decision_log` and `half_store` store decisions and half messages, `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_embedded.backend import EmbeddedBackend

    return [EmbeddedBackend()]
