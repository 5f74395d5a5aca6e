"""Attention over several devices: its measured cost, and its estimated cost on other devices."""
