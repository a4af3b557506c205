"""What `rare_events.py` compares: trials, the usual meta-analysis, and the same model on pooled rows."""
