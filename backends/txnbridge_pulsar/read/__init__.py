"""The reading side: `reader` reads topics, `partition` is one partition of it, `subscriptions` the ways to read."""
