"""Algorithms for any declared model, one per file."""
