"""Continuous batching: requests begin and end while the model writes the others."""
