"""A random order of very many rows that needs no memory: a permutation that is computed, not stored.

    (left, right) ← (right, left ⊕ f(right, key))        a few rounds, each undone by its inverse

is a permutation of the numbers of 2h bits whatever f is (a Feistel network; Luby and Rackoff 1988). Of n rows, with n
between two powers of four, a number that lands outside is sent through again until it lands inside (cycle walking;
Black and Rogaway 2002), fewer than four times on average. Cost: O(1) a row, where `torch.randperm` takes 8 n bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUNDS = 6
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio: spreads neighbouring numbers over all bits


def permuted(places: Tensor, count: int, key: int) -> Tensor:
    """Which of `count` rows stands at each of `places` (B,) in the order that belongs to `key`."""
    half = max(1, -(-(count - 1).bit_length() // 2))  # bits of each side
    found = places.numpy().astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = network(found[outside], half, key)
        outside = outside[found[outside] >= count]
    return torch.from_numpy(found.astype(np.int64))


def network(numbers: np.ndarray, half: int, key: int) -> np.ndarray:
    """A permutation of the numbers below 4^half."""
    low = np.uint64((1 << half) - 1)
    left, right = numbers >> np.uint64(half), numbers & low
    for round_key in scrambled(np.arange(1, ROUNDS + 1, dtype=np.uint64), np.uint64(key)):
        left, right = right, left ^ (scrambled(right, round_key) & low)
    return (left << np.uint64(half)) | right


def scrambled(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """Any function will do; this one lets every bit of the key and of the number reach the low ones."""
    mixed = (numbers * ODD) ^ key  # modulo 2⁶⁴
    mixed = (mixed ^ (mixed >> np.uint64(32))) * ODD
    mixed = (mixed ^ (mixed >> np.uint64(29))) * ODD
    return mixed ^ (mixed >> np.uint64(32))
