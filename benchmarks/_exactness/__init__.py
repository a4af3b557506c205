"""Models whose posteriors fits are held against."""
