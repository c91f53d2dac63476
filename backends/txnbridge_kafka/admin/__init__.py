"""The administrator's side: topics, groups, open transactions, the doctor, and the check when a bridge connects."""
