"""Ends of transactions: requesting an end, finding an outcome later, and delivering an end to all topics."""
