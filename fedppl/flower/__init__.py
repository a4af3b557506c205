"""Flower as an engine: what travels between a server and machines with data, and both ends of it."""
