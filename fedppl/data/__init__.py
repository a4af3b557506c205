"""Ways to divide one data set among clients, for studies of how federated methods take it."""

from fedppl.data.partition import concept_drift, dirichlet, feature_skew, label_skew, quantity
from fedppl.data.tables import Partition, plot, table

__all__ = ["Partition", "concept_drift", "dirichlet", "feature_skew", "label_skew", "plot", "quantity", "table"]
