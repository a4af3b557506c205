"""Algorithms for networks, one per file."""
