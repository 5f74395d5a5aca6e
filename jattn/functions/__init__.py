"""Users' masks, score functions and rules: how they are kept, read and asked about.

`snapshots` and `programs` make a function a lasting key of compiled programs. `read` makes an
expression of it (`nodes`), `intervals` says what is certain about that in a tile, and `undecided`
looks into the tiles of which nothing is.
"""
