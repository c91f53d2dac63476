"""Half messages, and the resolvers that ask about them."""
