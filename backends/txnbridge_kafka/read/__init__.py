"""The reading side: `reader` is one consumer, `assignment` holds its partitions, and `partition` is one of them.

`start_positions` says where partitions begin, `start_lookup` asks for that in the background, and `rebalance` follows
the group.
"""
