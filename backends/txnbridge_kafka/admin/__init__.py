"""Administration of a cluster: topics, groups, open transactions, the doctor, and the check at connecting."""
