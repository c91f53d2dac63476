"""Access to the broker's file: `files` checks the path, `schema` has the tables, `store` opens the file and queues its
writers, and `change_notification` waits for commits of other connections.
"""
