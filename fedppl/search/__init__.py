"""Choosing settings on validation data that the clients hold: rows never travel, sums of validation losses do."""
