"""For administrators: topics, groups, open transactions, and the doctor's checks."""
