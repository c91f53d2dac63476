"""The embedded broker: topics, groups and transactions in one SQLite file, shared by the processes of a machine.

How the promises stand on one file:

- A transaction waits in its writer's memory. Its commit stores all of it and its acknowledgements in one write
  transaction of SQLite's, so all of it is there or nothing, whenever the process dies: `write.writer`,
  `write.outgoing`, `group.acks`.
- A prepared one, and one larger than the memory, is in the file before its end, undecided: readers stop in front of it.
  The decision about it is one small write: `endings`.
- Opening a transactional id raises its epoch, which every write looks at: older owners are shut out. Each writer leaves
  evidence of what it committed last, which tells an outcome whose answer was lost: `write.instance`.
- No process runs in the background. Readers, and administrators' looks at the file, end what is overdue.
- Members of a group share partitions by leases, which threads of theirs renew: `group.members`, `group.assignment`. A
  member reads a partition that it has in order (`read.ordered`); members that share messages lease each
  one (`read.shared`).

A message: `write.writer` puts it into `write.outgoing`, which stores it under a number that holds its partition and its
offset (`storage.schema`). `read.polling` wakes up by `storage.wake`, looks how far each partition can be read
(`storage.bounds`), and hands out what its `read.cursor` has not had. A token: `broker` ends it by `endings`.

`storage` is the file, its locks and its turns. `backend` says what is promised and reads URLs, `likes` takes away what
another broker lacks, `log` and `halves` keep decisions and half messages, `admin` and `group.standing` are for people.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_embedded.backend import EmbeddedBackend

    return [EmbeddedBackend()]
