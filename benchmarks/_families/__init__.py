"""What `families.py` compares formulas with: data of every family, and the same models written by hand in PyMC."""
