"""The runnable experiments on attention: `headway lab`. One file an experiment; the registry is `EXPERIMENTS`."""

from typing import Any

from headway.inspection.experiments import (
    averaging,
    complexity,
    copying,
    layer_norm,
    masks,
    multi_head_robustness,
    permutation,
    rotary,
    scaling,
    single_head_noise,
    sinusoids,
    subspaces,
    synthesizer_limit,
    untied_qkv,
)
from headway.inspection.experiments.base import Experiment, Table

EXPERIMENTS: dict[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        copying,
        averaging,
        subspaces,
        single_head_noise,
        multi_head_robustness,
        scaling,
        untied_qkv,
        permutation,
        sinusoids,
        rotary,
        synthesizer_limit,
        masks,
        layer_norm,
        complexity,
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Table"]
