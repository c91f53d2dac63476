"""For administrators: topics, open transactions and halves, and the doctor's checks."""
