"""Writing: the tasks' prepared transactions, and the driver's decision."""
