"""Ends of transactions: requesting them, finding out later how a transaction has ended, and delivering its end."""
