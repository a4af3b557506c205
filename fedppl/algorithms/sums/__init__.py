"""The posterior by sums over clients: the same message to all, and nothing but sums of what they answer."""
