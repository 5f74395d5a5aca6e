"""A small language model of characters: trained on any text file, it writes more of the kind."""
