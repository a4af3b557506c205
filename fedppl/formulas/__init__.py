"""Formulas: parsed by formulae, agreed on by clients, declared in PyMC."""
