"""Experiments that use jattn through its public names only."""
