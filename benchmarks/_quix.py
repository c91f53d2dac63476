"""Sends messages to another topic with Quix Streams, exactly once; its last line is the seconds that this took.

It runs in an environment of its own (see `kafka_process`). Its arguments are the servers, the group, the source and
target topics, the number of messages, and the number of messages per transaction.
"""

import sys
import time

from quixstreams import Application


def main(servers: str, group: str, source: str, target: str, count: int, batch: int) -> None:
    begin = time.perf_counter()
    application = Application(
        broker_address=servers,
        consumer_group=group,
        processing_guarantee="exactly-once",
        auto_offset_reset="earliest",
        # Transactions end by their number of messages, and not by the clock.
        commit_every=batch,
        commit_interval=60,
        auto_create_topics=False,
        loglevel="WARNING",
    )
    taken = application.topic(source, value_deserializer="bytes", key_deserializer="bytes")
    given = application.topic(target, value_serializer="bytes", key_serializer="bytes")
    application.dataframe(taken).to_topic(given)
    application.run(count=count)
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
