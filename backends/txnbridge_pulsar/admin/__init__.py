"""Administration: topics, open transactions, repairs, the doctor, the cleanup of proof topics, and the REST client."""
