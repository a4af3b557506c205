"""Comparisons with a peer in one run; each prints a table and, last, one JSON line."""
