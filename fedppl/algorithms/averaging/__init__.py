"""Gradient steps at the clients, averaged by the server, and their kin."""
