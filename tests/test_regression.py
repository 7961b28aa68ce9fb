"""--baseline regression: the fit against an independent one, and what advantages make of it."""

import math

import numpy as np
import pytest
import torch

import grpo_rtg
from grpo_rtg import Episodes, ReturnRegression, compute_advantages


def make_episodes(lengths, seed=0, truncated=False, reward=None):
    """Episodes of these lengths [K, G] with random observations, and rewards unless one is given.

    truncated: True, False or [K, G].
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    mask = torch.arange(lengths.max()) < lengths[..., None]
    rewards = torch.randn(mask.shape, generator=generator).double()
    if reward is not None:
        rewards = torch.full_like(rewards, reward)
    return Episodes(
        obs=torch.randn(int(mask.sum()), 3, generator=generator),
        actions=torch.zeros(int(mask.sum()), 1),
        rewards=rewards.where(mask, 0),
        mask=mask,
        truncated=torch.tensor(truncated).expand(lengths.shape),
    )


ITERATIONS = [
    make_episodes([[9, 4, 1], [2, 7, 9]], 1, [[True, False, True], [False, False, True]]),
    make_episodes([[3, 8, 8], [8, 8, 1]], 2, [[False, True, False], [True, False, True]]),
    make_episodes([[5, 5, 5], [5, 5, 5]], 3, truncated=True),
]


def steps_of(episodes):
    """For each episode its group, its number in the group, its rewards, and if it was cut."""
    lengths = episodes.mask.sum(dim=-1).tolist()
    for k, group in enumerate(lengths):
        for g, length in enumerate(group):
            rewards = episodes.rewards[k, g, :length].tolist()
            yield k, g, rewards, bool(episodes.truncated[k, g])


def least_squares(iterations, regression, gamma, decay):
    """b [K, G, T + 1] after each iteration: numpy's least squares on the rows of all iterations.

    Only the random numbers of the features are taken from the regression.
    """
    frequencies, phases = regression.frequencies.numpy(), regression.phases.numpy()
    seen, blocks, results = [], [], []
    weights = np.zeros(1 + ReturnRegression.NUM_FEATURES)
    for episodes in iterations:
        times = [t for _, _, rewards, _ in steps_of(episodes) for t in range(len(rewards))]
        inputs = np.column_stack([episodes.obs.double().numpy(), times])
        seen = np.vstack([*seen, inputs])
        inputs = (inputs - seen.mean(axis=0)) / np.sqrt(seen.var(axis=0) + 1e-8)
        cosines = np.cos(np.clip(inputs, -10, 10) @ frequencies + phases)
        features = np.column_stack([np.ones(len(cosines)), cosines])
        rows = np.split(features, np.cumsum([len(x) for _, _, x, _ in steps_of(episodes)])[:-1])

        returns = []
        for row, (_, _, rewards, cut) in zip(rows, steps_of(episodes)):
            rewards = [*rewards, row[-1] @ weights * cut]
            n = len(rewards)
            returns += [sum(gamma ** (j - t) * rewards[j] for j in range(t, n)) for t in range(n)]
            returns.pop()

        blocks.insert(0, (features, np.array(returns)))  # with their ages as indices
        size = sum(decay**age * len(block) for age, (block, _) in enumerate(blocks))
        ridge = math.sqrt(1e-3 * size) * np.eye(len(weights))[1:]  # not on the constant
        a = np.vstack([*(decay ** (age / 2) * x for age, (x, _) in enumerate(blocks)), ridge])
        b = [
            *(decay ** (age / 2) * y for age, (_, y) in enumerate(blocks)),
            np.zeros(len(weights) - 1),
        ]
        weights = np.linalg.lstsq(a, np.concatenate(b))[0]

        values = np.zeros([*episodes.mask.shape[:2], episodes.mask.shape[2] + 1])
        for row, (k, g, rewards, cut) in zip(rows, steps_of(episodes)):
            values[k, g, : len(rewards)] = row @ weights
            values[k, g, len(rewards)] = row[-1] @ weights * cut
        results.append(torch.from_numpy(values))
    return results


@pytest.mark.parametrize("decay", [0.0, 0.67, 1.0])
def test_the_fit_is_weighted_least_squares(decay):
    """After a cut b is the last step's, and returns go on by the last fit; else b is 0."""
    regression = ReturnRegression(3, decay)
    expected = least_squares(ITERATIONS, regression, 0.9, decay)
    for episodes, values in zip(ITERATIONS, expected):
        torch.testing.assert_close(regression.fit(episodes, 0.9), values, rtol=1e-6, atol=1e-6)


def test_rewards_of_the_padding_do_not_count():
    episodes = ITERATIONS[0]
    garbage = episodes._replace(rewards=episodes.rewards.where(episodes.mask, math.nan))
    values = [ReturnRegression(3, 0.67).fit(each, 0.9) for each in (episodes, garbage)]
    assert torch.equal(*values)


def test_the_features_approximate_a_gaussian_kernel():
    """2/M Σ cos(wx + c) cos(wy + c) ≈ exp(-|x - y|² / (2 h²)), h = 2 standard deviations a input.

    Rahimi and Recht 2007.
    """
    for num_inputs in (4, 40):
        regression = ReturnRegression(num_inputs - 1, 0.0)
        x = torch.randn(20, num_inputs, generator=torch.Generator().manual_seed(0)).double()
        cosines = torch.cos(x @ regression.frequencies + regression.phases)
        expected = torch.exp(-torch.cdist(x, x).square() / (2 * 4 * num_inputs))
        assert (2 * cosines @ cosines.T / len(regression.phases) - expected).abs().mean() < 0.08


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("norm_std", [True, False])
def test_advantages_are_gae_over_the_baseline(gae_lambda, norm_std):
    """Σ_{j≥t} (γλ)^(j-t) (r_j + γ b_{j+1} - b_j) in scalars; λ = 1: R - b, R continued by b."""
    gamma = 0.8
    rewards, mask = ITERATIONS[0].rewards, ITERATIONS[0].mask
    values = ReturnRegression(3, 0.67).fit(ITERATIONS[0], gamma)
    expected = torch.zeros(mask.shape).double()
    for k, g, r, _ in steps_of(ITERATIONS[0]):
        b = values[k, g].tolist()
        for t in range(len(r)):
            rest = range(t, len(r))
            deltas = [r[j] + gamma * b[j + 1] - b[j] for j in rest]
            expected[k, g, t] = sum((gamma * gae_lambda) ** i * x for i, x in enumerate(deltas))
            if gae_lambda == 1:
                to_go = sum(gamma ** (j - t) * r[j] for j in rest) + gamma ** len(rest) * b[len(r)]
                assert float(expected[k, g, t]) == pytest.approx(to_go - b[t])
    if norm_std:
        for k in range(2):
            squares = [x * x for x in expected[k][mask[k]].tolist()]
            expected[k] /= math.sqrt(sum(squares) / (len(squares) - 1))

    def compute(rewards, values):
        fitted = {"baseline": "regression", "values": values, "gae_lambda": gae_lambda}
        return compute_advantages(rewards, mask, gamma, norm_std, **fitted)

    torch.testing.assert_close(compute(rewards, values), expected, rtol=1e-9, atol=1e-12)
    garbage = compute(rewards.where(mask, math.nan), values)
    assert torch.equal(garbage, compute(rewards, values))
    unit = 1e-9 * compute(rewards, values) if not norm_std else compute(rewards, values)
    torch.testing.assert_close(compute(1e-9 * rewards, 1e-9 * values), unit, rtol=1e-9, atol=0)


def test_tied_groups_still_teach_unless_nothing_differs():
    """Where all fail, b says which step was the worse; without any spread all is exactly 0."""
    mask = ITERATIONS[0].mask
    fails = torch.zeros(mask.shape)
    values = ReturnRegression(3, 0.67).fit(ITERATIONS[0], 0.9)
    fitted = {"baseline": "regression", "values": values}
    advantages = compute_advantages(fails, mask, 0.9, **fitted)
    assert (advantages[mask] != 0).all()
    for baseline in ("group", "timestep"):
        assert (compute_advantages(fails, mask, 0.9, baseline=baseline) == 0).all()

    ties = [make_episodes([[3, 1], [4, 2]], reward=0.0)]  # nobody has ever been paid
    ties += [make_episodes([[1, 1], [1, 1]], reward=reward) for reward in (0.1, 7e6)]
    for episodes in ties:
        regression = ReturnRegression(3, 0.67)
        for _ in range(2):
            values = regression.fit(episodes, 0.9)
            rewards, mask = episodes.rewards, episodes.mask
            fitted = {"baseline": "regression", "values": values}
            for norm_std in (True, False):
                advantages = compute_advantages(rewards, mask, 0.9, norm_std, **fitted)
                assert (advantages == 0).all()


def test_a_mistyped_baseline_is_none():
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="no baseline 'timesteps'"):
        compute_advantages(torch.rand(1, 2, 3), mask, 0.9, baseline="timesteps")


def with_column(obs, value):
    return torch.cat([obs, torch.full((len(obs), 1), value)], dim=1)


OBSERVATIONS = {  # two kinds of observations that say the same
    "huge": (lambda obs: 1e6 * obs, lambda obs: obs),
    "a constant column": (lambda obs: with_column(obs, 1000.1), lambda obs: with_column(obs, 0.0)),
    "bytes": (lambda obs: (50 * obs + 128).byte(), lambda obs: (50 * obs + 128).byte().float()),
}


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_units_do_not_matter(kind):
    """Of the observations; of the rewards the fit has theirs."""
    results = []
    for change in OBSERVATIONS[kind]:
        iterations = [episodes._replace(obs=change(episodes.obs)) for episodes in ITERATIONS]
        regression = ReturnRegression(iterations[0].obs.shape[1], 0.67)
        results.append(torch.cat([regression.fit(x, 0.9).flatten() for x in iterations]))
        paid = [x._replace(rewards=1e12 * x.rewards) for x in iterations]
        regression = ReturnRegression(iterations[0].obs.shape[1], 0.67)
        results.append(1e-12 * torch.cat([regression.fit(x, 0.9).flatten() for x in paid]))
    assert results[0].abs().max() > 0.1
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def test_too_many_inputs_are_one_sentence():
    ReturnRegression(4096, 0.67)
    with pytest.raises(grpo_rtg.UserError, match=r"4,097 numbers .*--baseline timestep\.$"):
        ReturnRegression(4097, 0.67)
