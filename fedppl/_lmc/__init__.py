"""Linear models of coregionalisation with spike-and-slab coefficients: the bound, its updates, and what reads a model.

`bound`, `unit` and `server` are numerics; `read` alone knows PyMC.
"""
