"""Attention over several devices: what it costs here, and what it would cost elsewhere."""
