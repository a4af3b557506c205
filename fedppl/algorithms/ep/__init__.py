"""Expectation propagation, and what it is made of."""
