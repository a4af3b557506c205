"""Algorithms for linear models of coregionalisation, one per file."""
