"""Local attention and BigBird against dense attention under the mask that their definition says, written with loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.nn import attend
from headway.nn.attention import join_heads
from headway.nn.bigbird import BigBird
from headway.nn.local import Local
from headway.nn.positions import make_position


def local_pattern(count: int, reach: int, causal: bool) -> Tensor:
    pattern = torch.zeros(count, count, dtype=torch.bool)
    for t in range(count):
        for s in range(count):
            pattern[t, s] = abs(t - s) <= reach and (s <= t or not causal)
    return pattern


def bigbird_pattern(layer: BigBird, count: int, window: int, globals: int) -> Tensor:
    """By the paper's words; only the random blocks are taken from the layer."""
    b = layer.block
    pattern = torch.zeros(count, count, dtype=torch.bool)
    for t in range(count):
        for s in range(count):
            beside = abs(t // b - s // b) <= window // 2
            everyone = s // b < globals or (t // b < globals and not layer.causal)
            random = s // b in layer.pattern[t // b].tolist()
            pattern[t, s] = (beside or everyone or random) and (s <= t or not layer.causal)
    return pattern


def dense(layer, x: Tensor, pattern: Tensor, mask: Tensor | None) -> Tensor:
    positions = torch.arange(x.shape[1])
    q, k, v = layer.project(x, positions)
    allowed = pattern if mask is None else pattern & mask[:, None, None, :]
    bias = layer.position.bias(q * layer.scale, positions, positions) if layer.position is not None else None
    out = layer.output(join_heads(attend(q, k, v, allowed, bias=bias)))
    return out if mask is None else out * allowed.any(-1)[:, 0, :, None]  # who sees nobody gets zeros


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 50, 64])
@pytest.mark.parametrize("reach", [0, 1, 5, 20])
def test_local_equals_dense_attention_under_a_band(reach: int, count: int, causal: bool, masked: bool) -> None:
    torch.manual_seed(count)
    layer = Local(8, 2, causal=causal, reach=reach).double()
    x = torch.randn(2, count, 8, dtype=torch.float64)
    mask = torch.rand(2, count) > 0.3 if masked else None
    pattern = local_pattern(count, reach, causal)
    positions = torch.arange(count)
    assert torch.equal(layer.sees(positions, positions), pattern)
    torch.testing.assert_close(layer(x, positions, mask=mask), dense(layer, x, pattern, mask), atol=1e-12, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "globals", "randoms"), [(1, 0, 0), (3, 1, 2), (1, 2, 1), (5, 0, 3)])
@pytest.mark.parametrize("count", [1, 7, 8, 30, 64])
def test_bigbird_equals_dense_attention_under_its_pattern(
    count: int, window: int, globals: int, randoms: int, causal: bool, masked: bool
) -> None:
    torch.manual_seed(count)
    options = {"block": 4, "window": window, "globals": globals, "randoms": randoms}
    layer = BigBird(8, 2, causal=causal, length=64, **options).double()
    x = torch.randn(2, count, 8, dtype=torch.float64)
    mask = torch.rand(2, count) > 0.3 if masked else None
    pattern = bigbird_pattern(layer, count, window, globals)
    positions = torch.arange(count)
    assert torch.equal(layer.sees(positions, positions), pattern)
    torch.testing.assert_close(layer(x, positions, mask=mask), dense(layer, x, pattern, mask), atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["alibi", "t5", "relative", "rotary"])
def test_positions_act_inside_the_blocks_as_they_do_outside(name: str, causal: bool) -> None:
    torch.manual_seed(3)
    position = make_position(name, 8, 2, causal=causal)
    layer = Local(8, 2, causal=causal, reach=5, position=position).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, positions = torch.randn(2, 40, 8, dtype=torch.float64), torch.arange(40)
    v = layer.project(x, positions)[2]
    weights = layer.weights(x, positions)
    expected = weights @ v + position.values(weights, positions, positions)
    torch.testing.assert_close(layer(x, positions), layer.output(join_heads(expected)), atol=1e-10, rtol=0)


def test_each_block_has_its_random_blocks_once_and_beside_the_others() -> None:
    layer = BigBird(8, 2, length=400, block=4, window=3, globals=2, randoms=3)
    for block, row in enumerate(layer.pattern.tolist()):
        seen = [other for other in row if other >= 0]
        assert len(seen) == len(set(seen))
        far = [other for other in seen if abs(other - block) > 1 and other >= 2]
        assert len(far) == 3
    assert len({tuple(row) for row in layer.pattern.tolist()}) == 100


def test_no_matrix_of_all_pairs_is_built() -> None:
    """Every tensor that a pass makes and its gradients make stays far under T × T numbers."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, Tensor):
                    self.numbers = max(self.numbers, each.numel())
            return result

    count = 4096
    for layer in (Local(8, 2, reach=16), BigBird(8, 2, length=count, block=16)):
        x = torch.randn(1, count, 8, requires_grad=True)
        with Largest() as largest:
            layer(x, torch.arange(count)).sum().backward()
        assert 0 < largest.numbers < count * count / 8


def test_errors_name_the_values() -> None:
    with pytest.raises(ValueError, match=r"65 positions.*built for 64"):
        BigBird(8, 2, length=64, block=8)(torch.zeros(1, 65, 8), torch.arange(65))
    with pytest.raises(ValueError, match=r"window of blocks \(2\)"):
        BigBird(8, 2, length=64, window=2)
    with pytest.raises(ValueError, match="longest length"):
        BigBird(8, 2)
    with pytest.raises(ValueError, match="not -1"):
        Local(8, 2, reach=-1)
