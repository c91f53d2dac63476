"""Writing into the broker's file: `writer` in transactions, `publisher` without, both by `staged_messages`. `owner`
fences older owners and records commits, `acks` stores acknowledgements, and `retention` removes old messages.
"""
