"""The embedded broker: topics, groups and transactions in one SQLite file, shared by the processes of a machine.

How one file keeps the guarantees:

- A transaction's messages wait in its writer's memory. Its commit stores messages and acknowledgements in one write
  transaction of SQLite, so all of them are stored or none, whenever the process dies: `write.writer`,
  `write.staged_messages`, `write.acks`.
- A prepared transaction, and one larger than the memory, is stored in the file before its end, undecided: readers stop
  before its first message. The decision about the transaction is one small write: `outcome.ending`.
- Opening a transactional id raises its epoch, which every write checks: this fences older owners. Each writer stores
  the number of its last commit, which proves the outcome if SQLite failed during a commit: `write.owner`.
- No process runs in the background. Readers and administrators abort expired transactions, whose deadline has passed.
- Members of a group have leases, which background threads renew, and the group's partitions are divided among them:
  `read.group_assignments`. A member reads its partitions in order (`read.ordered`). With
  `sharing="message"` each message is leased to one member (`read.shared`).

The path of a message: `write.writer` puts it into `write.staged_messages`, which stores it with a row id made of its
partition and its offset (`client.schema`). `client.change_notification` wakes `read.base_reader`, which looks up the
readable range of each partition (`client.readable_ranges`). Its `read.partition` reads the messages there.

`client` opens the file and queues its writers. `backend` reads URLs, `imitation` has the profiles of other brokers
for `like=`, `decision_log` and `half_store` store decisions and half messages, and `admin` is for administrators.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_embedded.backend import EmbeddedBackend

    return [EmbeddedBackend()]
