"""From dot products to a Transformer in small steps, each run, checked and drawn."""
