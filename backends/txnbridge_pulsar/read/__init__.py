"""The reading side: `reader` reads topics, `partition` has its state for one partition, `subscriptions` the modes."""
