"""The kernels, each a way of computing attention, and the table of them; see README.md."""
