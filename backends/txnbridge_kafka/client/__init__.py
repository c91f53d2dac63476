"""The protocol client: kafka-python's raw requests and confluent-kafka's clients. It knows nothing of bridges.

`requests` has a method for each raw request. `request_runner` repeats a request until it is answered, on the
`connections` that one thread has at a time; `messages` makes the requests, `responses` has what brokers answer.
`coordinator_session` is a connection that is never made anew. `offsets` asks about positions.
`librdkafka` and `kafka_python` wrap the two libraries.
"""
