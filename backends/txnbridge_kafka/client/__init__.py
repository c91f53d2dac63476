"""The protocol client: raw requests, and confluent-kafka's clients. Nothing in it depends on a bridge.

`requests` has a method for each raw request. `request_retry` repeats a request until it is answered, on `connections`
that one thread uses at a time. `connection` is one of them, with its login, and `wire` the protocol's bytes.
`messages` builds the requests, and converts the answers to the types in `protocol_types`. `marker_proof` is a
connection to a coordinator that is never re-established. `librdkafka` wraps confluent-kafka.
"""
