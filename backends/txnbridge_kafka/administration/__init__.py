"""What administrators see and do: topics, groups, others' transactions; and advice, at a connection too (`preflight`)."""
