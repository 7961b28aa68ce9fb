"""--baseline neighbors against loops over plain Python floats, by hand, and its properties."""

import importlib
import math
import statistics
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import grpo_rtg
from tests.child import TINY
from tests.test_oracle import mean, normalize_steps, pad, to_go

MANY = 10**6  # more neighbours than there are steps


def compute(rewards, mask, obs, gamma=0.9, k=3, norm_std=True):
    torch.set_num_threads(1)  # as in a run; more wait for each other where others are busy
    return grpo_rtg.compute_advantages(rewards, mask, gamma, norm_std, "neighbors", obs, k)


def block(*lengths: list[int], dims=2, seed=0):
    """Rewards, mask and observations of these lengths; the padding looks like steps."""
    longest, generator = max(map(max, lengths)), torch.Generator().manual_seed(seed)
    mask = torch.stack([torch.arange(longest) < torch.tensor(group)[:, None] for group in lengths])
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return rewards, mask, torch.randn(*mask.shape, dims, generator=generator)


# ---- the oracle: a group is a list of episodes, an episode a list of steps
def unpad(values, mask):
    groups = zip(values.tolist(), mask.tolist())
    return [[x[: sum(taken)] for x, taken in zip(*group)] for group in groups]


def returns_to_go(rewards, mask, gamma):
    return [[to_go(episode, gamma) for episode in group] for group in unpad(rewards, mask)]


def in_units_of_their_spread(points):
    columns = [(column, statistics.pstdev(column)) for column in zip(*points)]  # 0 if constant
    return list(zip(*([x / std if std else 0.0 for x in column] for column, std in columns)))


def baselines(rewards, mask, obs, gamma, k, least=0):
    """Which of equally near steps count is open; those of least R with least=1, of most with -1."""
    returns = sum(returns_to_go(rewards, mask, gamma), [])  # of all groups
    rows = sum(unpad(obs, mask), [])
    steps = [(i, t) for i, R in enumerate(returns) for t in range(len(R))]
    points = in_units_of_their_spread([[*rows[i][t], t] for i, t in steps])
    found = {}
    for (i, t), point in zip(steps, points):
        near = sorted(
            (round(math.dist(point, other), 7 if least else 15), least * returns[j][u], j, u)
            for (j, u), other in zip(steps, points)
            if j != i
        )
        found[i, t] = mean([returns[j][u] for *_, j, u in near[: k or MANY]])
    b = iter([[found[i, t] for t in range(len(R))] for i, R in enumerate(returns)])
    return [[next(b) for _ in group] for group in mask]


def padded(groups):
    return pad(groups, 0.0, torch.float64)[0]


def subtracted(rewards, mask, obs, gamma=0.9, k=3):
    returns = padded(returns_to_go(rewards, mask, gamma))
    return returns - compute(rewards, mask, obs, gamma, k, norm_std=False)


def oracle(rewards, mask, obs, gamma=0.9, k=3, norm_std=True):
    pairs = zip(returns_to_go(rewards, mask, gamma), baselines(rewards, mask, obs, gamma, k))
    return padded([normalize_steps(R, b, norm_std) for R, b in pairs])


def random_block(seed):
    """Up to 3 groups of up to 5 episodes of up to 9 steps, 1 to 4 numbers seen at each."""
    generator = torch.Generator().manual_seed(seed)
    K, G, T, dims = (1 + int(torch.randint(n, (), generator=generator)) for n in (3, 4, 8, 4))
    lengths = torch.randint(1, T + 2, (K, G + 1), generator=generator)
    return block(*lengths.tolist(), dims=dims, seed=seed)


@pytest.mark.parametrize("norm_std", [True, False])
@pytest.mark.parametrize("k", [0, 1, 3, 16, MANY])
@pytest.mark.parametrize("seed", range(18))
def test_advantages_match_the_loops(seed, k, norm_std):
    rewards, mask, obs = random_block(seed)
    rewards = rewards.to([torch.float32, torch.float64][seed % 2])
    args = rewards, mask, obs, [0.0, 0.9, 1.0][seed % 3], k, norm_std
    torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-9, atol=1e-12)  # 0s, too


def test_as_many_steps_as_in_training_match_the_loops():
    args = *block([80, 150, 111, 9], [130, 1, 70, 90], dims=4), 0.99, 16
    torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [0, 1, 3, 16])
@pytest.mark.parametrize("kind", ["one-hot", "integers"])
def test_any_of_equally_near_steps_may_count_but_no_other(kind, k):
    rewards, mask, obs = block([4, 7, 6], [7, 1, 5], dims=3)
    rewards = rewards.round()  # so that many ties are of one R
    obs = torch.eye(3)[obs.argmax(-1)] if kind == "one-hot" else obs.round()
    low, high = (padded(baselines(rewards, mask, obs, 0.0, k, sign))[mask] for sign in (1, -1))
    b = subtracted(rewards, mask, obs, 0.0, k)[mask]
    assert (low - 1e-9 < b).all() and (b < high + 1e-9).all()
    fixed = (high - low < 1e-9).sum()
    assert fixed == len(b) if k == 0 else 0 < fixed < len(b)


# ---- by hand
def test_three_walks_by_hand():
    """Positions 0 2 2 | 6 6 | 2 spread three times as much as the times 0 1 2 | 0 1 | 0: one step
    later is as far as 3 away. Rewards 1 1 2 | 0 3 | 2, R = 4 3 2 | 3 3 | 2.
    """
    rewards = torch.tensor([[[1.0, 1, 2], [0, 3, 0], [2, 0, 0]]])
    mask = torch.tensor([[[True, True, True], [True, True, False], [True, False, False]]])
    obs = torch.tensor([[[0.0, 2, 2], [6, 6, 0], [2, 0, 0]]])[..., None]
    # position@time: the nearest of another episode, how far that is
    centred = [
        [4 - 2, 3 - 2, 2 - 3],  # 0@0: 2@0, 2; 2@1: 2@0, 3; 2@2: 6@1, 5 by 4 away and 1 step
        [3 - 2, 3 - 3, 0],  # 6@0: 2@0, 4; 6@1: 2@1, 4, though its own 6@0 is at 3
        [2 - 4, 0, 0],  # 2@0: 0@0, 2
    ]
    assert compute(rewards, mask, obs, 1.0, 1, norm_std=False)[0].tolist() == centred
    expected = [1.348, 0.674, -0.674, 0.674, 0, 0, -1.348, 0, 0]  # std sqrt(11 / 5) = 1.483
    given = compute(rewards, mask, obs, 1.0, 1).flatten().tolist()
    assert given == pytest.approx(expected, abs=5e-4)


def test_the_nearest_step_may_be_in_another_group():
    """Single steps at 0, 10 | 1, 12 that pay 5, 1 | 2, 7: b = 2, 7 | 5, 1."""
    rewards = torch.tensor([[[5.0], [1]], [[2], [7]]])
    obs = torch.tensor([[[0.0], [10]], [[1], [12]]])[..., None]
    args = rewards, torch.ones_like(rewards, dtype=torch.bool), obs, 1.0, 1
    assert compute(*args, norm_std=False).flatten().tolist() == [3, -6, -3, 6]


# ---- properties
def test_enough_neighbors_are_all_steps_of_the_other_episodes():
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    R = padded(returns_to_go(rewards, mask, 0.9))
    others = (R.sum() - R.sum(-1)) / (mask.sum() - mask.sum(-1))  # [K, G]
    for k in (0, int(mask.sum()), MANY):
        b = subtracted(rewards, mask, obs, k=k)
        assert torch.allclose(b, others[..., None].where(mask, 0), rtol=1e-9)


def test_where_only_time_differs_it_is_the_timestep_baseline():
    """R minus the others' mean is G / (G - 1) times R minus the mean of all."""
    rewards, mask, obs = block([9] * 5)
    for norm_std, factor in ((True, 1), (False, 5 / 4)):
        given = compute(rewards, mask, torch.full_like(obs, 0.1), k=4, norm_std=norm_std)
        expected = grpo_rtg.compute_advantages(rewards, mask, 0.9, norm_std, "timestep")
        assert torch.allclose(given, factor * expected, rtol=1e-9)


@pytest.mark.parametrize(("G", "k", "T"), [(2, 1, 500), (4, 1, 90), (4, 3, 90)])
def test_identical_episodes_give_exactly_zero(G, k, T):
    rewards, mask, obs = (x.expand(-1, G, *x.shape[2:]) for x in block([T], [7], dims=4))
    for x in (rewards, torch.full(mask.shape, 0.1)):  # of float64, of float32
        for norm_std in (True, False):
            assert (compute(x, mask, obs, 0.99, k, norm_std) == 0).all()


def test_identical_episodes_with_an_unusual_end_give_exactly_zero():
    """Far from the mean, where in float32 the step after the copy would be as near as the copy."""
    rewards, obs = torch.ones(1, 2, 500), (torch.arange(500) >= 490).float()[:, None]
    assert (compute(rewards, rewards > 0, obs.expand(1, 2, 500, 50), 0.99, 1) == 0).all()


def test_units_and_origins_of_observations_do_not_matter():
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6], dims=3)
    units, origins = torch.tensor([1e-3, 7, 1e4]), torch.tensor([0.01, -50, 3e4])
    expected = compute(rewards, mask, obs)
    for other in (obs * units, obs + 3, obs * units + origins):
        assert torch.allclose(compute(rewards, mask, other), expected, rtol=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_a_constant_coordinate_counts_for_nothing(constant):
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    more = torch.cat([torch.full(mask.shape, constant).where(mask, -1)[..., None], obs], -1)
    assert torch.allclose(compute(rewards, mask, more), compute(rewards, mask, obs), rtol=1e-9)


def test_an_episodes_baseline_is_not_of_its_own_steps():
    """Not even where these are by far the nearest."""
    rewards, mask, obs = block([6, 7, 5], [4, 8, 6])
    obs = 0.01 * obs + 5 * obs[:, :, :1]  # far from one episode to the next
    b = subtracted(rewards, mask, obs)
    for k, g in mask[..., 0].nonzero().tolist():
        other = rewards.clone()
        other[k, g] = 10 * rewards[k, g].flip(0) + 1
        assert torch.allclose(subtracted(other, mask, obs)[k, g], b[k, g], rtol=1e-9)


def test_garbage_in_the_padding_changes_nothing():
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    expected = compute(rewards, mask, obs)
    assert (expected[~mask] == 0).all() and (expected[mask] != 0).all()
    for garbage in (0.0, 1e9, float("nan"), float("inf")):
        paid, seen = rewards.where(mask, garbage), obs.where(mask[..., None], garbage)
        for args in ((paid, mask, obs), (rewards, mask, seen), (paid, mask, seen)):
            assert torch.equal(compute(*args), expected)


def test_the_order_of_members_and_of_groups_does_not_matter():
    args = block([3, 7, 5, 2], [2, 4, 6, 1], [5, 5, 2, 3])
    expected, members, groups = compute(*args), [2, 0, 3, 1], [2, 0, 1]
    assert torch.allclose(compute(*(x[:, members] for x in args)), expected[:, members], rtol=1e-9)
    assert torch.allclose(compute(*(x[groups] for x in args)), expected[groups], rtol=1e-9)


def test_a_lone_episode_gives_zero():
    for k, norm_std in ((0, True), (0, False), (16, True), (16, False)):
        assert (compute(*block([6]), 0.9, k, norm_std) == 0).all()


def test_small_differences_far_from_the_origin_count():
    rewards, mask, obs = block([9, 7, 8], [6, 9, 9], dims=3)
    args = rewards, mask, 1e4 + 0.02 * obs  # float32 is 0.001 apart there
    torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-9, atol=1e-12)


def test_a_run_hands_over_what_was_seen_at_each_step(monkeypatch):
    """Countdown shows its length and the steps taken."""
    watched = Mock(wraps=grpo_rtg.compute_advantages)
    monkeypatch.setattr(grpo_rtg, "compute_advantages", watched)
    options = {"env_id": "tests.envs:Countdown-v0", "baseline": "neighbors", "num_neighbors": 5}
    options |= {"total_timesteps": 500, "seed_groups": False, "gamma": 0.8, "eval_episodes": 1}
    grpo_rtg.train(grpo_rtg.Args(**options))
    for call in watched.call_args_list:
        _, mask, *options, obs, num_neighbors = call.args
        assert options == [0.8, True, "neighbors"] and num_neighbors == 5
        seen = torch.stack([mask.sum(-1, keepdim=True).expand_as(mask), mask.cumsum(-1) - 1], -1)
        assert obs.dtype == torch.float32 and (obs == seen)[mask].all()
    assert watched.called


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run(env_id, cli):
    args = ["--baseline", "neighbors", "--num-neighbors", 4, "--env-id", env_id]
    status, out, err = cli("grpo_rtg", *TINY["grpo_rtg"], *args, "--total-timesteps", 2000)
    assert status == 0 and "Trained" in out and "evaluation, 2 episodes" in out, err


@pytest.mark.parametrize("k", [0, 2, 16])
def test_the_program_of_the_ablations_has_this_baseline_and_others(k, monkeypatch):
    """Its plain search finds the same; without time, or in the own group alone, something else."""
    monkeypatch.syspath_prepend(str(Path(grpo_rtg.__file__).parent / "docs" / "benchmark"))
    choices = importlib.import_module("neighbor_choices")
    x, mask, obs = block([5, 9, 7], [8, 2, 6])
    expected = grpo_rtg.nearest_mean(x, obs, mask, k)[mask]
    assert torch.allclose(choices.nearest_mean(x, obs, mask, k)[mask], expected)
    for group in (0, 1):  # its own, with the units of both
        found = choices.nearest_mean(x, obs, mask, 0, candidates="group")[group][mask[group]]
        alone = grpo_rtg.nearest_mean(*(y[group : group + 1] for y in (x, obs, mask)), 0)[0]
        assert torch.allclose(found, alone[mask[group]])
    seen = mask.cumsum(-1)[..., None].float()  # the time, as all that is observed
    timeless = choices.nearest_mean(x, seen, mask, k, time_weight=0.0)[mask]
    assert torch.allclose(timeless, choices.nearest_mean(x, seen, mask, k)[mask])
    if k == 2:
        assert not torch.allclose(
            choices.nearest_mean(x, obs, mask, k, time_weight=0.0)[mask], expected
        )
    few = choices.nearest_mean(x, obs, mask, 0, candidates="5")[mask]
    assert few.unique().numel() <= 7  # of at most five, less one's own
