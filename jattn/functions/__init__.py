"""The functions that users write as masks, score functions and normalizers.

`snapshots` and `programs` replace equal functions by one object, so that they share compiled
programs. `read` translates a function to an expression (`nodes`), `intervals` bounds the expression
in a tile, and `undecided` evaluates the tiles that bounds leave undecided.
"""
