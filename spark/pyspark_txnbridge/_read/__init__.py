"""Reading: the positions that a batch covers, and its messages."""
