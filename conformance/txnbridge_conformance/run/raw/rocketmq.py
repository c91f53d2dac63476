"""RocketMQ through its official client for Python, for `--through raw`: half messages of one message each."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

from txnbridge import Decision
from txnbridge_conformance.run.client import Client
from txnbridge_conformance.run.sales import Sales

# The defaults of RocketMQ 5.5. Brokers that a run starts send check-backs sooner, and store fewer duplicates.
DEFAULTS = {
    "transactionTimeOut": "6000",
    "transactionCheckInterval": "30000",
    "transactionCheckMax": "15",
    "transactionOpMsgMaxSize": "4096",
    "transactionOpBatchInterval": "3000",
}


def sell(client: Client) -> NoReturn:
    """Store half messages whose local work commits, aborts or fails, and answer check-backs, until SIGTERM.

    The value of the message is also the id of the transaction in the history. The client chooses the queue, so topics
    of these runs have one queue.
    """
    os.environ["HOME"] = client.plan.folder  # the client writes a log there
    rocketmq: Any = importlib.import_module("rocketmq")
    sales = Sales(client.plan.sales)
    chance = client.random.random

    class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
        def check(self, message: Any) -> Any:
            value = message.body.decode()
            call = client.recorder.start("check", transaction=value, values=[value])
            committed = sales.decide(value, Decision.ABORT) is Decision.COMMIT
            resolutions = rocketmq.TransactionResolution
            answer = resolutions.COMMIT if committed else resolutions.ROLLBACK
            call.end("ok")  # not before: the client says nothing about an error in here
            return answer

    opened = client.recorder.start("open")
    configuration = rocketmq.ClientConfiguration(client.plan.grpc, rocketmq.Credentials())
    producer = rocketmq.Producer(configuration, client.plan.sold, checker=Checker())
    producer.startup()
    opened.end("ok")
    while not client.stop.wait(client.random.uniform(0, 0.1)):
        if client.plan.closing.exists():
            continue
        (value,), topic = client.values(1), client.random.choice(client.plan.sold)
        call = client.recorder.start("half", transaction=value)
        call.send(topic, 0, [value])
        message = rocketmq.Message()
        message.topic, message.body = topic, value.encode()
        transaction = producer.begin_transaction()
        try:
            producer.send(message, transaction)
            decision = sales.decide(value, Decision.COMMIT if chance() < 0.7 else Decision.ABORT)
            if chance() < 0.1:
                raise RuntimeError("the process failed after the local work")
            (transaction.commit if decision is Decision.COMMIT else transaction.rollback)()
        except Exception as error:  # errors of gRPC, too
            call.end("unknown", error=type(error).__name__)
        else:
            committed = decision is Decision.COMMIT
            call.end("ok" if committed else "fail", outcome="committed" if committed else "aborted")
    os._exit(0)  # threads of the client would go on
