"""Implementations of attention, one file each, all of the same meaning."""
