"""Processors: loops that read messages, call a handler for them, and publish its results, in one transaction.

- `processor` is the loop. A pass of it is one poll and the processing of the polled messages, a `polled_batch`, in a
  `pass_transaction`: a broker's or a database's. `inputs` has its consumers, `handler` calls the handler.
- `failure_policy` judges errors. A message that the handler cannot process is set aside: it becomes a dead letter
  (`dead_letters`), or waits in a retry topic for another attempt (`retries`). `origin` has the headers of both.
- `redrive` sends dead letters back, and `retry_overview` shows the messages that wait.
"""
