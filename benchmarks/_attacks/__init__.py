"""Attacks on a federation, one module for each thing that is attacked."""
