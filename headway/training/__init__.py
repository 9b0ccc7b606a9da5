"""From batches to weights: the loop, optimizers, schedules, checkpoints."""
