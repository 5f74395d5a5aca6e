"""Compiles attention for GPUs and TPUs on a machine without them, and analyses the programs."""
