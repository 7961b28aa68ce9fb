"""grpo_rtg.py whose advantages are divided by their root mean square over the whole iteration."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg

plain = grpo_rtg.compute_advantages


def compute_advantages(rewards, mask, gamma, norm_std=True, **options):
    advantages = plain(rewards, mask, gamma, norm_std=False, **options)
    return advantages / advantages[mask].square().mean().sqrt().clamp(min=1e-12)


grpo_rtg.compute_advantages = compute_advantages
