"""grpo_rtg.py with the mean of a group's advantages taken off, for docs/ablations.md."""

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg

plain = grpo_rtg.compute_advantages


def centred(rewards: Tensor, mask: Tensor, gamma: float, norm_std: bool = True, **options):
    """compute_advantages, then less the group's mean, over the group's standard deviation."""
    advantages = plain(rewards, mask, gamma, norm_std=False, **options)
    num_steps = mask.sum(dim=(1, 2), keepdim=True)
    mean = advantages.sum(dim=(1, 2), keepdim=True) / num_steps
    advantages = (advantages - mean).where(mask, 0)
    square_sum = advantages.square().sum(dim=(1, 2), keepdim=True)
    std = (square_sum / (num_steps - 1)).sqrt()
    return (advantages / std).where(std > 1e-12, 0)


grpo_rtg.compute_advantages = centred
