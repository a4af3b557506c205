"""Linear models of coregionalisation: their view of a client, their bound, algorithms and predictions."""
