"""Users' masks, score functions and normalizers as keys of programs and as expressions.

`snapshots` and `programs` make a function a lasting key of compiled programs. `read` makes an
expression of it (`nodes`), `intervals` bounds the expression in a tile, and `undecided` evaluates
the tiles that bounds leave undecided.
"""
