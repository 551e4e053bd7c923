"""A tree of candidate tokens behind a sequence's settled trunk: cells, positions, attention mask.

Nodes are numbered in the order in which they are fed to the model; node i is written to cell
`trunk + i` of the sequence's slot and has rotary position `trunk + depth(i)`. A node sees the whole
trunk, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ROOT = -1  # parent of a node that hangs directly on the trunk


class TokenTree:
    """Grows pass by pass; the ancestor matrix is kept incrementally.

    In numpy, whose assignment of a row takes 1 us where torch's takes 15: a node is a row.
    """

    def __init__(self, trunk: int, capacity: int) -> None:
        self.trunk = trunk
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._sees = np.zeros((capacity, capacity), dtype=bool)  # [node, ancestor or itself]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        """Most nodes the tree can hold."""
        return self._sees.shape[0]

    def add(self, token: int, parent: int = ROOT) -> int:
        """Appends a node and returns its number. The parent must be in the tree already."""
        node = len(self.tokens)
        if node >= self.capacity:
            raise ValueError(f"token tree: more than its capacity of {self.capacity} nodes")
        if not ROOT <= parent < node:
            raise ValueError(f"token tree: parent {parent} of node {node} is not in the tree")
        if parent != ROOT:
            self._sees[node, :node] = self._sees[parent, :node]
        self._sees[node, node] = True
        self.tokens.append(token)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        return node

    def positions(self, first: int) -> list[int]:
        """Rotary positions of the nodes from `first` on."""
        return [self.trunk + depth for depth in self.depths[first:]]

    def mask(self, first: int) -> torch.Tensor:
        """What the nodes from `first` on see of the tree: bool [new nodes, all nodes]."""
        return torch.from_numpy(self._sees[first : len(self), : len(self)])

    def cells(self, nodes: Sequence[int]) -> list[int]:
        """The cache cells of `nodes`."""
        return [self.trunk + node for node in nodes]
