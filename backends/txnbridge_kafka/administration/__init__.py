"""What administrators see and do: topics, groups, others' transactions, advice, and the look when a bridge connects."""
