"""Reading: a reader, its partitions (queues), the group's members and positions, and the filter for duplicates."""
