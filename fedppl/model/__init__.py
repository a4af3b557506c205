"""The declaration, one client's compiled model, and what checks and compiles them; nothing else compiles models."""
