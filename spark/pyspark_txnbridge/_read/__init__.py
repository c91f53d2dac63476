"""Reading: planning the positions that a Spark batch covers, and fetching their messages in Spark's tasks."""
