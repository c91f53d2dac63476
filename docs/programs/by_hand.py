# by_hand.py
import os

from confluent_kafka import Consumer, KafkaException, Producer

servers = os.environ["SERVERS"]
producer = Producer({"bootstrap.servers": servers, "transactional.id": "shipping-1"})
producer.init_transactions()
consumer = Consumer(
    {
        "bootstrap.servers": servers,
        "group.id": "shipping",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
    }
)
consumer.subscribe(["orders"])
for _ in range(int(os.environ["TURNS"])):
    messages = consumer.consume(500, timeout=1)
    if not messages:
        continue
    try:
        producer.begin_transaction()
        for message in messages:
            producer.produce("shipments", message.value(), key=message.key())
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()
    except KafkaException as error:
        if not error.args[0].txn_requires_abort():
            raise  # fenced, or the outcome is unknown: start the process again
        producer.abort_transaction()  # and go back to the committed positions, or the batch is lost:
        for position in consumer.committed(consumer.assignment()):
            consumer.seek(position)
consumer.close()
