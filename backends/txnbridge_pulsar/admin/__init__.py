"""Administration: topics, open transactions, repairs and advice; and the cleanup of proof topics."""
