"""Ends of transactions whose messages are in the file, undecided."""
