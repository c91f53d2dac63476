"""The writing side: who owns a transactional id, its transactions, and what is sent without one."""
