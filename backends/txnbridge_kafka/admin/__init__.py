"""What administrators see and do: topics, groups, open transactions, the doctor, and the checks at connecting."""
