"""Writing into the broker's file: `writer` in transactions, `publisher` without, both by `staged_messages`; `acks`
stores acknowledgements, and `retention` removes old messages.
"""
