"""Writing: the owner of a transactional id, its writers, which store half messages, and the publisher."""
