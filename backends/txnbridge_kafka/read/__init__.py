"""The reading side: `reader` is one consumer, `assignment` has its partitions, and `partition` is one partition.

`start_positions` finds the offsets at which partitions are read first, `start_lookup` calls it in the background, and
`rebalance` has the callbacks for the group's rebalances.
"""
