"""Half messages: stored unpublished, until the outcome of work outside the broker, such as a database's, is known.

- A half is all half messages of one transaction. It is done when its messages are published or dropped.
- `half_messages` stores halves and does the work. A check-back asks how the work of a process that died has ended; a
  `resolver` answers it. A parked half gets no check-backs any more, until an administrator acts.
- `topic_half_store` is for brokers without half messages. A `lane` is a transactional id, and the topic of that name:
  its holder, the process that has opened the id last, stores and ends halves there. A beat is the holder's heartbeat,
  a record in the topic. `index` lists the halves that are not done; `records` are the topic's records.
"""
