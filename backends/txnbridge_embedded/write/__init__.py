"""Writing into the file: `writer` in transactions, `publisher` without, both through `staged_messages`; `acks` stores
acknowledgements, and `retention` removes old messages.
"""
