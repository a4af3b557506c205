"""Engines: they move messages and know no statistics."""
