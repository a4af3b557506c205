"""What `pfedvem.py` is made of: the paper's figures, who holds what, one fit, and what is told of fits."""
