"""Formulas: their terms by formulaic, agreed on by clients, declared in PyMC."""
