"""Reading: `reader` reads topics, `partition` has a reader's state for one partition, `subscriptions` has the modes of
reading, `group_registry` notices lost subscriptions.
"""
