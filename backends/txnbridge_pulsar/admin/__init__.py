"""What administrators see and do: topics, open transactions, repairs, advice; and the cleanup of proof topics."""
