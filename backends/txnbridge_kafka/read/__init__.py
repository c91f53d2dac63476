"""The reading side: `reader` is one consumer, `assignment` has its partitions, and `partition` is one partition.

`start_positions` looks up the offsets at which the reading of partitions starts. `start_lookup` runs these look-ups in
the background, and `assignment` also has the callbacks for the group's rebalances.
"""
