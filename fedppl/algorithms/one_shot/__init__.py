"""One round: each client's own posterior, alone or combined."""
