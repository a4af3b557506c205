"""Newton steps, marginals, importance weights, covariances, random streams: NumPy, SciPy and Numba only."""
