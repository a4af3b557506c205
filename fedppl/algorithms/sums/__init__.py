"""The posterior of what clients share, from sums over clients alone."""
