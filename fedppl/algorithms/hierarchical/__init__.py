"""Clients with parameters of their own under a prior that is estimated."""
