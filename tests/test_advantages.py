"""Properties of the advantages, and a test for each published bug. Numbers against loops are in
test_oracle.py.
"""

import math

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
    """Rewards and mask [K, G, T] of groups with these episode lengths; random rewards unless all
    are value.
    """
    longest = max(map(max, lengths))
    mask = torch.stack([torch.arange(longest) < torch.tensor(group)[:, None] for group in lengths])
    rewards = torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (rewards if value is None else torch.full_like(rewards, value)).where(mask, 0), mask


@each_variant
def test_garbage_in_the_padding_changes_nothing(compute):
    rewards, mask = block([3, 7, 5], [2, 2, 6])
    expected = compute(rewards, mask, 0.9, True)
    for garbage in (1e9, float("nan"), float("inf")):
        assert torch.equal(compute(rewards.where(mask, garbage), mask, 0.9, True), expected)
    assert (expected[~mask] == 0).all()


@each_variant
def test_groups_do_not_leak_into_each_other(compute):
    rewards, mask = block([3, 7, 5], [2, 2, 6])
    both = compute(rewards, mask, 0.9, True)
    for k in range(2):
        assert torch.allclose(
            both[k : k + 1], compute(rewards[k : k + 1], mask[k : k + 1], 0.9, True), atol=1e-12
        )
    rewards[1] *= 100
    assert torch.equal(both[0], compute(rewards, mask, 0.9, True)[0])


@each_variant
@pytest.mark.parametrize("unit", [1e-12, 7.0, 1e12])
def test_the_unit_of_the_rewards_does_not_matter(compute, unit):
    rewards, mask = block([3, 7, 5], [2, 2, 6])
    assert torch.allclose(
        compute(unit * rewards, mask, 0.9, True), compute(rewards, mask, 0.9, True), rtol=1e-9
    )
    raw = compute(rewards, mask, 0.9, False)
    # no division, no invariance
    assert torch.allclose(compute(unit * rewards, mask, 0.9, False), unit * raw, rtol=1e-9)


def test_a_constant_added_to_the_rewards_shifts_only_the_baseline():
    """Outcome and return-to-go where lengths are equal; process whatever the lengths, for it pools
    single steps.
    """
    rewards, mask = block([6, 6, 6])
    for name in ("outcome", "process", "rtg_timestep"):
        args = (mask, 0.9, True)
        assert torch.allclose(
            VARIANTS[name](rewards + 5, *args), VARIANTS[name](rewards, *args), atol=1e-9
        ), name
    rewards, mask = block([3, 7, 5])
    shifted = VARIANTS["process"](rewards + 5, mask, 0.9, True)
    assert torch.allclose(shifted, VARIANTS["process"](rewards, mask, 0.9, True), atol=1e-9)


@each_variant
def test_the_order_of_the_members_does_not_matter(compute):
    rewards, mask = block([3, 7, 5, 2])
    order = torch.tensor([2, 0, 3, 1])
    moved = compute(rewards[:, order], mask[:, order], 0.9, True)
    assert torch.allclose(moved, compute(rewards, mask, 0.9, True)[:, order], atol=1e-12)


@pytest.mark.parametrize("name", ["outcome", "process", "rtg_timestep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("members", [2, 3, 7])
def test_ties_give_exactly_zero(name, dtype, members):
    """500 equal rewards of 0.1 must not become noise divided by a tiny number (for float32 they
    would).
    """
    rewards, mask = block([500] * members, value=0.1)
    for norm_std in (True, False):
        assert (VARIANTS[name](rewards.to(dtype), mask, 0.99, norm_std) == 0).all()


def test_ties_in_one_group_leave_the_other_alone():
    rewards, mask = block([4, 4], [4, 4])
    rewards[0] = 0.1
    advantages = VARIANTS["outcome"](rewards, mask, 1.0, True)
    assert (advantages[0] == 0).all() and (advantages[1] != 0).all()


def test_differences_of_rounding_are_ties():
    rewards, mask = block([3, 3], value=0.1)
    rewards[0, 0] = torch.tensor([0.2, 0.1, 0.0]).double() + 1e-9
    assert (VARIANTS["outcome"](rewards, mask, 1.0, True) == 0).all()


def test_two_members_are_a_preference():
    """With G = 2 the outcome advantages are ±1/√2 whatever the margin."""
    for margin in (1e-3, 1.0, 1e6):
        rewards, mask = (
            torch.tensor([[[1.0 + margin], [1.0]]]),
            torch.ones(1, 2, 1, dtype=torch.bool),
        )
        advantages = VARIANTS["outcome"](rewards, mask, 1.0, True).flatten().tolist()
        assert advantages == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)])


@pytest.mark.parametrize("gamma", [0.0, 0.999, 1.0])
def test_sums_reach_to_the_end_of_a_long_episode(gamma):
    x = torch.rand(2, 1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x.clone()
    for t in reversed(range(1000)):
        expected[:, t] += gamma * expected[:, t + 1]
    for script in (grpo_outcome, grpo_process, grpo_rtg):
        torch.testing.assert_close(script.discounted_sums(x, gamma), expected, rtol=1e-12, atol=0)


def test_process_is_zero_where_every_step_pays_the_same():
    rewards, mask = block([20, 500, 83], value=1.0)  # CartPole
    assert (VARIANTS["process"](rewards, mask, 1.0, True) == 0).all()
    assert (VARIANTS["outcome"](rewards, mask, 1.0, True)[mask] != 0).all()


def test_process_ranks_by_reward_rate():
    """Â_{i,0} = (R_i - |o_i| mean) / std: the long episode earns 6, twice the short one's 3, and
    scores below it.
    """
    rewards = torch.tensor([[[1.0, 2.0, 0, 0, 0, 0], [1.0] * 6]])
    mask = torch.tensor([[[True, True, False, False, False, False], [True] * 6]])
    first_steps = VARIANTS["process"](rewards, mask, 1.0, True)[0, :, 0]
    mean, std = 9 / 8, math.sqrt((7 * (1 / 8) ** 2 + (7 / 8) ** 2) / 7)
    assert first_steps.tolist() == pytest.approx([(3 - 2 * mean) / std, (6 - 6 * mean) / std])
    assert first_steps[0] > first_steps[1]


def test_perfect_episodes_look_bad_at_their_end_only_to_the_pooled_baseline():
    """Eight CartPole episodes of 500 steps at γ = 0.99: the time limit is nobody's fault."""
    rewards, mask = block([500] * 8, value=1.0)
    pooled = VARIANTS["rtg"](rewards, mask, 0.99, True)
    assert -3.5 < pooled[..., -10:].mean() < -2.5
    assert (VARIANTS["rtg_timestep"](rewards, mask, 0.99, True) == 0).all()
    assert (VARIANTS["outcome"](rewards, mask, 0.99, True) == 0).all()


def test_gamma_discounts_the_outcome():
    rewards, mask = (
        torch.tensor([[[0.0, 0.0, 4.0], [1.5, 0.0, 0.0]]]),
        torch.ones(1, 2, 3, dtype=torch.bool),
    )
    assert VARIANTS["outcome"](rewards, mask, 1.0, False)[0, :, 0].tolist() == [1.25, -1.25]
    assert VARIANTS["outcome"](rewards, mask, 0.5, False)[0, :, 0].tolist() == [-0.25, 0.25]


class TestPublishedBugs:
    """One test for each row of the table of bugs in public code; each fails for that bug."""

    rewards, mask = block([3, 5, 4, 1], seed=1)

    def test_std_computed_with_mean(self):
        """Normalised values have a sample standard deviation of 1."""
        values = VARIANTS["rtg"](self.rewards, self.mask, 0.9, True)[self.mask]
        assert values.std().item() == pytest.approx(1) and values.mean().item() == pytest.approx(
            0, abs=1e-12
        )
        assert VARIANTS["outcome"](self.rewards, self.mask, 0.9, True)[
            0, :, 0
        ].std().item() == pytest.approx(1)

    @each_variant
    def test_return_inside_the_loop_over_t(self, compute):
        """Every real step has an advantage of its own (outcome: its episode's), not the first one
        only.
        """
        advantages = compute(self.rewards, self.mask, 0.9, True)
        # A lone survivor is its own per-timestep mean.
        alone = (self.mask.sum(1, keepdim=True) == 1) & (compute is VARIANTS["rtg_timestep"])
        values = advantages[self.mask & ~alone]
        assert (values != 0).all()
        assert len(values.unique()) == (4 if compute is VARIANTS["outcome"] else len(values))

    def test_dead_members_counted_as_zeros(self):
        """The per-timestep mean is over the living: what it leaves sums to 0 at every t."""
        left = VARIANTS["rtg_timestep"](self.rewards, self.mask, 0.9, False)
        assert left.sum(1).abs().max() < 1e-12
        assert left[0, 1, 4] == 0  # the only one still alive

    def test_undiscounted_episode_return_subtracted_from_discounted_returns_to_go(self):
        """The advantages of a group balance; they are not all negative for eight perfect CartPole
        episodes.
        """
        rewards, mask = block([500] * 8, value=1.0)
        advantages = VARIANTS["rtg"](rewards, mask, 0.99, True)
        assert advantages.sum().abs() < 1e-6 and (advantages > 0).any()

    @pytest.mark.parametrize("name", ["process", "rtg", "rtg_timestep"])
    def test_cumulative_sum_through_an_episodes_end(self, name):
        """A member's last step earns its own reward, whatever the next member's steps pay."""
        rewards, mask = (
            torch.ones(1, 2, 3),
            torch.tensor([[[True, True, False], [True, True, True]]]),
        )
        rewards[0, 0, 1], rewards[0, 1] = 7.0, torch.tensor([1.0, 5.0, 3.0])
        raw = VARIANTS[name](rewards, mask, 1.0, False)[0, 0, 1].item()
        baseline = {"process": 17 / 5, "rtg": (8 + 7 + 9 + 8 + 3) / 5, "rtg_timestep": (7 + 8) / 2}[
            name
        ]
        assert raw == pytest.approx(7 - baseline)


def test_an_unknown_baseline_is_an_error():
    with pytest.raises(KeyError, match="time"):
        grpo_rtg.compute_advantages(
            torch.ones(1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool), 1.0, baseline="time"
        )
