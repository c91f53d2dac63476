"""The parts that all rooms of the core use: connections, messages, topics, tokens, deadlines and events."""
