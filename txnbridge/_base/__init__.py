"""What all rooms use: connections, messages, topics, tokens, deadlines and events."""
