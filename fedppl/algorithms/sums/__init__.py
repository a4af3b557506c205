"""The posterior by sums over clients, and what is read of single ones once it is known."""
