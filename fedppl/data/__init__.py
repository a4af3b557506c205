"""Ways to divide one data set among clients, for studies of how federated methods take it."""

from fedppl.data.partition import Partition, concept_drift, dirichlet, feature_skew, label_skew

__all__ = ["Partition", "concept_drift", "dirichlet", "feature_skew", "label_skew"]
