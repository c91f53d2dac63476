"""The reading side: `reader` is one consumer, `partition` one partition of it, `start_positions` finds its start."""
