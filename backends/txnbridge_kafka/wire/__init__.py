"""What is said to brokers: kafka-python's raw requests, confluent-kafka's clients, and the errors of both in our words.

`requests` has a method for each request. Each of them asks through `asking` (until there is an answer, by a deadline)
on a `line` (one thread's connections), with `bodies` as what is sent and `answers` as what comes back. `library` is
kafka-python itself.
"""
