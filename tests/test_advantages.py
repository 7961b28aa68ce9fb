"""Properties of the advantages, and a test for each published bug.

Numbers against loops are in test_oracle.py, --baseline regression is in test_regression.py.
"""

import pytest
import torch

import grpo_outcome
import grpo_process
import grpo_rtg

VARIANTS = {
    "outcome": grpo_outcome.compute_advantages,
    "process": grpo_process.compute_advantages,
    "rtg": lambda *args: grpo_rtg.compute_advantages(*args, baseline="group"),
    "rtg_timestep": lambda *args: grpo_rtg.compute_advantages(*args, baseline="timestep"),
}
each_variant = pytest.mark.parametrize("compute", VARIANTS.values(), ids=VARIANTS.keys())


def block(*lengths: list[int], value=None, seed=0):
    """Rewards [K, G, T], random ones or all value, and mask of groups with these lengths."""
    longest = max(map(max, lengths))
    mask = torch.stack([torch.arange(longest) < torch.tensor(group)[:, None] for group in lengths])
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if value is not None:
        rewards = torch.full_like(rewards, value)
    return rewards.where(mask, 0), mask


@each_variant
def test_garbage_in_the_padding_changes_nothing(compute):
    rewards, mask = block([3, 7, 5], [2, 2, 6])
    expected = compute(rewards, mask, 0.9, True)
    for garbage in (1e9, float("nan"), float("inf")):
        assert torch.equal(compute(rewards.where(mask, garbage), mask, 0.9, True), expected)
    assert (expected[~mask] == 0).all()


@each_variant
@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_the_unit_of_the_rewards_does_not_matter(compute, unit):
    rewards, mask = block([3, 7, 5], [2, 2, 6])
    # Without division, advantages have the unit; an epsilon in the divisor would show.
    for norm_std, factor in ((True, 1), (False, unit)):
        expected = factor * compute(rewards, mask, 0.9, norm_std)
        given = compute(unit * rewards, mask, 0.9, norm_std)
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["outcome", "process", "rtg_timestep"])
def test_ties_give_exactly_zero(name):
    """500 equal rewards of 0.1 must not become noise divided by a tiny number, as in float32."""
    for members in (2, 3, 7):
        rewards, mask = block([500] * members, value=0.1)
        for norm_std in (True, False):
            assert (VARIANTS[name](rewards.float(), mask, 0.99, norm_std) == 0).all()


@each_variant
def test_rounding_is_a_tie_and_a_small_spread_counts(compute):
    rewards, mask = torch.full((1, 3, 4), 0.1), torch.ones(1, 3, 4, dtype=torch.bool)
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(1.0))  # one float32 further
    assert (compute(rewards, mask, 0.0, True) == 0).all()
    rewards[0, 2, 0] += 1e-4
    assert compute(rewards, mask, 0.0, True).abs().max() > 1


def test_perfect_episodes_look_bad_at_their_end_only_to_the_pooled_baseline():
    """Eight CartPole episodes of 500 steps at γ = 0.99: the time limit is nobody's fault.

    A published bug: less the mean undiscounted episode return all are negative. They balance.
    """
    rewards, mask = block([500] * 8, value=1.0)
    pooled = VARIANTS["rtg"](rewards, mask, 0.99, True)
    assert pooled.sum().abs() < 1e-6 and (pooled > 0).any()
    assert -3.5 < pooled[..., -10:].mean() < -2.5


class TestPublishedBugs:
    """In public code. Others (a return inside the loop over t, …) are seen by test_oracle.py."""

    rewards, mask = block([3, 5, 4, 1], seed=1)

    def test_std_computed_with_mean(self):
        """Normalised values have a sample standard deviation of 1."""
        values = VARIANTS["rtg"](self.rewards, self.mask, 0.9, True)[self.mask]
        assert values.std().item() == pytest.approx(1)
        assert values.mean().item() == pytest.approx(0, abs=1e-12)
        values = VARIANTS["outcome"](self.rewards, self.mask, 0.9, True)[0, :, 0]
        assert values.std().item() == pytest.approx(1)

    def test_dead_members_counted_as_zeros(self):
        """The per-timestep mean is over the living: what it leaves sums to 0 at every t."""
        left = VARIANTS["rtg_timestep"](self.rewards, self.mask, 0.9, False)
        assert left.sum(dim=1).abs().max() < 1e-12
        assert left[0, 1, 4] == 0  # the only one still alive

    @pytest.mark.parametrize(
        ("name", "baseline"),
        [("process", 17 / 5), ("rtg", (8 + 7 + 9 + 8 + 3) / 5), ("rtg_timestep", (7 + 8) / 2)],
    )
    def test_cumulative_sum_through_an_episodes_end(self, name, baseline):
        """A member's last step earns its own reward, whatever the next member's steps pay."""
        rewards = torch.tensor([[[1.0, 7.0, 0.0], [1.0, 5.0, 3.0]]])
        mask = torch.tensor([[[True, True, False], [True, True, True]]])
        raw = VARIANTS[name](rewards, mask, 1.0, False)[0, 0, 1].item()
        assert raw == pytest.approx(7 - baseline)
