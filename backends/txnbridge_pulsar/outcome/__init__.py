"""The ends of transactions: requested, found out later, and delivered to every topic and subscription."""
