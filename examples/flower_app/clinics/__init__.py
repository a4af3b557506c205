"""Three clinics, one hierarchical regression."""
