"""Apache RocketMQ over its remoting protocol, with the decision log as the authority on outcomes.

RocketMQ's model, as far as the promises depend on it:

- The broker knows transactions of one message, a half message or half. No reader sees it before its producer commits.
  The broker publishes a half again each time it receives a commit. A transaction here is many halves and one record in
  the application's decision log. That record is the commit; the broker publishes the halves afterwards (hazard H66).
- So a decision cannot be undone, and readers may see some messages of a transaction before the others.
- An owner ends its fresh halves directly. Every other process first looks up whether the message is published.
- For a half that no process has ended the broker sends check-backs to any bridge of the application. The bridge answers
  from the decision log, and does not respond while nothing is decided. In each round the broker writes a copy of the
  half; after the last round it discards the half, which then waits for an administrator. Before the first round, in
  the half's immunity time, only its owner ends it.
- If a message was published twice, the one with the lower offset counts. So readers filter duplicates without state.
- A group's position is in the decision log, not in the broker's offset store. The decision log decides whose
  acknowledgement counts. The assignment of queues to members only saves them wasted work.
- A topic has no id, but each record has an offset in the broker's commit log. By that offset of a reference record,
  which it has read earlier, a reader notices that a topic was deleted and created again.

The rooms:

- `broker` opens everything else; `cluster` finds the cluster's id and home broker, which has the bridge's own topics;
  `decision_log` and `half_store` are on topics. The log's `AppendQueue` joins the records that several threads append.
- `client/` is the protocol client, which is independent of bridges.
- `write/`: `owner`, `writer` and `acks`; `half_buffer` sends halves with their `transaction_properties`.
- `read/`: a `reader` with a `partition` for each queue; `pull`, `duplicates`, `start_positions`, `rebalance`.
- `outcome/`: `outcome` by tokens, `end_transaction` for halves, `check_back` with its `producer_groups`.
- `admin/`: `admin`, `doctor` and `open_halves`. `settings/`: the options, `names`, and `broker_config` of brokers.
"""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_rocketmq.backend import RocketMQBackend

    return [RocketMQBackend()]
