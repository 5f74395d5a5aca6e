"""A random tree whose nodes are numbered in depth-first order, for variants that need one."""

import functools

import numpy as np


@functools.cache
def parents(T: int) -> np.ndarray:
    """Returns the parent of each node, int32 `[T]`; node 0 is the root, whose parent is −1.

    A node is the child of the previous one, or with probability 1/4 of one of its ancestors.
    """
    rng = np.random.default_rng(0)
    parent = np.full(T, -1, np.int32)
    path = [0]  # from the root to the previous node
    for node in range(1, T):
        if rng.random() < 0.25:
            del path[int(rng.integers(1, len(path) + 1)) :]
        parent[node] = path[-1]
        path.append(node)
    return parent


@functools.cache
def depths_and_ends(T: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the depth of each node, and the first number after its subtree, both int32 `[T]`."""
    depth, end = np.zeros(T, np.int32), np.arange(1, T + 1, dtype=np.int32)
    for node in range(1, T):
        depth[node] = depth[parents(T)[node]] + 1
    for node in range(T - 1, 0, -1):
        parent = parents(T)[node]
        end[parent] = max(end[parent], end[node])
    return depth, end


@functools.cache
def ancestors(T: int) -> np.ndarray:
    """Returns the matrix of pairs whose second node is the first one or its ancestor."""
    matrix = np.eye(T, dtype=bool)
    for node in range(1, T):
        matrix[node] |= matrix[parents(T)[node]]
    return matrix


def path_sums(edges: np.ndarray) -> np.ndarray:
    """Returns the sum of numbers along the path between all pairs of nodes, int32 `[T, T]`.

    `edges` `[T]` has the number of the edge between each node and its parent.
    """
    T = len(edges)
    matrix = np.zeros((T, T), np.int32)
    for node in range(1, T):
        matrix[node, :node] = matrix[parents(T)[node], :node] + edges[node]
        matrix[:node, node] = matrix[node, :node]
    return matrix
