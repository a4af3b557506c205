"""Models whose posteriors EP's correction is held against."""
