"""A small character-level language model: trained on a text file, it generates similar text."""
