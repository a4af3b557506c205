"""Each client's own posterior, alone or combined in one round."""
