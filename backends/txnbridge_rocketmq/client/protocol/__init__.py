"""The bytes of RocketMQ's remoting protocol: frames, records, and requests with their answers."""
