"""--baseline neighbors against loops over plain Python floats, by hand, and its properties."""

import importlib
import math
import statistics
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import grpo_rtg
from tests.child import TINY
from tests.test_oracle import mean, normalize_steps, pad, to_go

MANY = 10**6  # more neighbours than there are episodes


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


def baselines(rewards, mask, obs, gamma, k, tie=min, power=2, steps=0, time_weight=1, own=False):
    """Which of an episode's equally near steps is the one is open: that of least R or, with
    tie=max, of most. The last four are the choices of docs/benchmark/neighbor_choices.py.
    """
    returns = sum(returns_to_go(rewards, mask, gamma), [])  # of all groups
    seen, G = sum(unpad(obs, mask), []), mask.shape[1]
    points = [[[*row, t] for t, row in enumerate(episode)] for episode in seen]
    stds = [statistics.pstdev(column) for column in zip(*sum(points, []))]
    scales = [1 / std if std else 0.0 for std in stds]
    scales[-1] *= time_weight

    def away(here, there):
        return math.hypot(*((a - b) * scale for a, b, scale in zip(here, there, scales)))

    def baseline(i, here):
        others = [j for j in range(len(points)) if j != i and (not own or j // G == i // G)]
        found = [
            [(away(here, there), R) for there, R in zip(points[j], returns[j])] for j in others
        ]
        if steps:
            return mean([R for _, R in sorted(sum(found, []))[:steps]])
        nearest = [min(episode)[0] for episode in found]
        reach = sorted(nearest)[k - 1] if 0 < k < len(nearest) else math.inf
        terms = [
            ((d * d + 1e-12) ** (-power / 2), tie(R for e, R in episode if e <= d * (1 + 1e-9)))
            for d, episode in zip(nearest, found)
            if d <= reach * (1 + 1e-9)
        ]
        return sum(weight * R for weight, R in terms) / sum(weight for weight, _ in terms)

    rows = iter([[baseline(i, here) for here in steps_] for i, steps_ in enumerate(points)])
    return [[next(rows) for _ in group] for group in mask]


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
    args = *block([80, 150, 111, 9], [130, 1, 70, 90], dims=4), 0.99, 4
    torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [0, 1, 3, 16])
@pytest.mark.parametrize("kind", ["one-hot", "integers"])
def test_any_of_an_episodes_equally_near_steps_may_count_but_no_other(kind, k):
    """All of the episodes as far as the k-th do."""
    rewards, mask, obs = block([4, 7, 6], [7, 1, 5], dims=3)
    rewards = rewards.round()  # so that many ties are of one R
    obs = torch.eye(3)[obs.argmax(-1)] if kind == "one-hot" else obs.round()
    low, high = (padded(baselines(rewards, mask, obs, 0.0, k, tie))[mask] for tie in (min, max))
    b = subtracted(rewards, mask, obs, 0.0, k)[mask]
    assert (low - 1e-9 < b).all() and (b < high + 1e-9).all()
    assert 0 < (high - low < 1e-9).sum() < len(b)


@pytest.mark.parametrize("k", [0, 4])
def test_thousands_of_steps_match_the_distances_between_all_episodes(k):
    """With each other episode in turn: in whatever blocks the search goes, none is lost."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 500, (2, 12), generator=generator)
    x, mask, obs = block(*lengths.tolist(), dims=3)
    points = torch.cat([obs, mask.cumsum(-1)[..., None]], -1)[mask].double()
    points = (points / points.std(0, correction=0)).split(lengths.flatten().tolist())
    values = x[mask].split(lengths.flatten().tolist())
    expected = []
    for i, here in enumerate(points):
        others = [j for j in range(len(points)) if j != i]
        found = [(here[:, None] - points[j]).square().sum(-1).min(1) for j in others]
        squares = torch.stack([distances for distances, _ in found])
        terms = torch.stack([values[j][steps] for j, (_, steps) in zip(others, found)])
        near = squares <= squares.kthvalue(k or len(others), dim=0).values
        weights = near / (squares + 1e-12)
        expected.append((weights * terms).sum(0) / weights.sum(0))
    given = grpo_rtg.nearest_mean(x, obs, mask, k)[mask]
    torch.testing.assert_close(given, torch.cat(expected), rtol=1e-9, atol=1e-12)


# ---- by hand
def test_three_walks_by_hand():
    """Positions 0 2 2 | 6 6 | 2 spread three times as much as the times 0 1 2 | 0 1 | 0: their
    variances are 30 / 6 and 5 / 9, and one step later is as far as 3 away. Rewards 1 1 2 | 0 3 | 2,
    R = 4 3 2 | 3 3 | 2. All squares of distances are in the units of the positions.
    """
    rewards = torch.tensor([[[1.0, 1, 2], [0, 3, 0], [2, 0, 0]]])
    mask = torch.tensor([[[True, True, True], [True, True, False], [True, False, False]]])
    obs = torch.tensor([[[0.0, 2, 2], [6, 6, 0], [2, 0, 0]]])[..., None]
    # position@time: the nearest step of each other member, its squared distance and its R
    by_hand = {
        4: [  # the default: both of the others
            # 0@0: 6@0 36, R 3; 2@0 4, R 2: (3/36 + 2/4) / (1/36 + 1/4) = 21/10
            4 - 21 / 10,
            # 2@1: 6@1 16, R 3; 2@0 9, R 2: (3/16 + 2/9) / (1/16 + 1/9) = 59/25
            3 - 59 / 25,
            # 2@2: 6@1 16 + 9, R 3; 2@0 36, R 2: (3/25 + 2/36) / (1/25 + 1/36) = 158/61
            2 - 158 / 61,
            # 6@0: 2@1 16 + 9, R 3 (0@0: 36); 2@0 16, R 2: (3/25 + 2/16) / (1/25 + 1/16) = 98/41
            3 - 98 / 41,
            # 6@1: 2@1 16, R 3; 2@0 16 + 9, R 2: (3/16 + 2/25) / (1/16 + 1/25) = 107/41
            3 - 107 / 41,
            0,
            # 2@0: 0@0 4, R 4 (2@1: 9); 6@0 16, R 3: (4/4 + 3/16) / (1/4 + 1/16) = 19/5
            2 - 19 / 5,
            0,
            0,
        ],
        1: [4 - 2, 3 - 2, 2 - 3, 3 - 2, 3 - 3, 0, 2 - 4, 0, 0],  # the nearer one of these
    }
    # the sums of squares are 8.1318 and 11, the stds sqrt(8.1318 / 5) = 1.2753 and sqrt(11 / 5)
    normalized = {
        4: [1.490, 0.502, -0.463, 0.478, 0.306, 0, -1.411, 0, 0],
        1: [1.348, 0.674, -0.674, 0.674, 0, 0, -1.348, 0, 0],
    }
    for k, centred in by_hand.items():
        given = compute(rewards, mask, obs, 1.0, k, norm_std=False).flatten().tolist()
        assert given == pytest.approx(centred, rel=1e-9, abs=1e-9)
        given = compute(rewards, mask, obs, 1.0, k).flatten().tolist()
        assert given == pytest.approx(normalized[k], abs=6e-4)


def test_the_nearest_step_may_be_in_another_group():
    """Single steps at 0, 10 | 1, 12 that pay 5, 1 | 2, 7: b = 2, 7 | 5, 1."""
    rewards = torch.tensor([[[5.0], [1]], [[2], [7]]])
    obs = torch.tensor([[[0.0], [10]], [[1], [12]]])[..., None]
    args = rewards, torch.ones_like(rewards, dtype=torch.bool), obs, 1.0, 1
    assert compute(*args, norm_std=False).flatten().tolist() == pytest.approx([3, -6, -3, 6])


def test_all_episodes_as_far_as_the_kth_count():
    """Single steps at 0 | 1 | -1 | 5 | -5 that pay 9 | 1 | 2 | 30 | 70, seen from 0."""
    rewards = torch.tensor([[[9.0], [1], [2], [30], [70]]])
    obs = torch.tensor([[[0.0], [1], [-1], [5], [-5]]])[..., None]
    for k, b in ((1, 3 / 2), (2, 3 / 2), (3, (3 + 100 / 25) / (2 + 2 / 25))):
        args = rewards, torch.ones_like(rewards, dtype=torch.bool), obs, 1.0, k
        assert compute(*args, norm_std=False)[0, 0].item() == pytest.approx(9 - b)


# ---- properties
def test_zero_or_enough_neighbors_are_all_other_episodes():
    args = block([3, 7, 5], [2, 2, 6])
    expected = compute(*args, k=0)
    assert all(torch.equal(compute(*args, k=k), expected) for k in (5, 6, MANY))
    assert not torch.allclose(compute(*args, k=4), expected)


def test_four_count_unless_told_otherwise():
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    given = grpo_rtg.compute_advantages(rewards, mask, 0.9, True, "neighbors", obs)
    assert grpo_rtg.Args().num_neighbors == 4
    assert torch.equal(given, compute(rewards, mask, obs, k=4))
    for k in (0, 1, 2, 3, 5):
        assert not torch.allclose(given, compute(rewards, mask, obs, k=k))


@pytest.mark.parametrize("k", [0, 1, 3, 16])
def test_where_only_time_differs_it_is_the_timestep_baseline(k):
    """R minus the others' mean is G / (G - 1) times R minus the mean of all."""
    rewards, mask, obs = block([9] * 5)
    for norm_std, factor in ((True, 1), (False, 5 / 4)):
        given = compute(rewards, mask, torch.full_like(obs, 0.1), k=k, norm_std=norm_std)
        expected = grpo_rtg.compute_advantages(rewards, mask, 0.9, norm_std, "timestep")
        assert torch.allclose(given, factor * expected, rtol=1e-9)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_at_the_common_start_it_is_the_mean_of_the_other_members(k):
    """Whatever the other groups pay; those of k < 3 are as near as the k-th."""
    rewards, mask, obs = block([9, 5, 7, 1], [3, 8, 6, 4], [2, 2, 9, 9], dims=4)
    obs[:, :, 0] = obs[:, :1, 0]
    start = padded(returns_to_go(rewards, mask, 0.9))[..., 0]
    others = (start.sum(1, keepdim=True) - start) / 3
    for scale in (1, 1000):
        paid = rewards * torch.tensor([1, scale, 1])[:, None, None]
        b = subtracted(paid, mask, obs, k=k)[..., 0]
        for group in (0, 2):
            # a neighbour at d counts 1e-12 / d² beside them
            torch.testing.assert_close(b[group], others[group], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("G", "k", "T"), [(2, 1, 500), (4, 1, 90), (4, 3, 90), (4, 0, 90)])
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
    obs = obs.double()  # float32 would round them otherwise
    units, origins = torch.tensor([1e-3, 7, 1e4]), torch.tensor([0.01, -50, 3e4])
    expected = compute(rewards, mask, obs)
    for other in (obs * units, obs + 3, obs * units + origins):
        assert torch.allclose(compute(rewards, mask, other), expected, rtol=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_a_constant_coordinate_counts_for_nothing(constant):
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    more = torch.cat([torch.full(mask.shape, constant).where(mask, -1)[..., None], obs], -1)
    assert torch.allclose(compute(rewards, mask, more), compute(rewards, mask, obs), rtol=1e-9)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_an_episodes_baseline_is_not_of_its_own_steps(k):
    """Not even where these are by far the nearest."""
    rewards, mask, obs = block([6, 7, 5], [4, 8, 6])
    obs = 0.01 * obs + 5 * obs[:, :, :1]  # far from one episode to the next
    b = subtracted(rewards, mask, obs, k=k)
    for group, g in mask[..., 0].nonzero().tolist():
        other = rewards.clone()
        other[group, g] = 10 * rewards[group, g].flip(0) + 1
        assert torch.allclose(subtracted(other, mask, obs, k=k)[group, g], b[group, g], rtol=1e-9)


def test_the_inputs_stay_as_they_are():
    """In float64, too, of which a function that works in float64 needs no copy."""
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    for args in ((rewards, mask, obs), (rewards.float(), mask, obs.double())):
        copies = [x.clone() for x in args]
        compute(*args)
        x, mask, obs = args
        grpo_rtg.nearest_mean(x, obs, mask, 3)
        assert all(torch.equal(x, copy) for x, copy in zip(args, copies))


@pytest.mark.parametrize("k", [0, 3])
def test_garbage_in_the_padding_changes_nothing(k):
    rewards, mask, obs = block([3, 7, 5], [2, 2, 6])
    expected = compute(rewards, mask, obs, k=k)
    assert (expected[~mask] == 0).all() and (expected[mask] != 0).all()
    for garbage in (0.0, 1e9, float("nan"), float("inf")):
        paid, seen = rewards.where(mask, garbage), obs.where(mask[..., None], garbage)
        for args in ((paid, mask, obs), (rewards, mask, seen), (paid, mask, seen)):
            assert torch.equal(compute(*args, k=k), expected)


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


def test_small_differences_far_from_the_mean_count():
    """|a|² - 2ab + |b|² would have lost them."""
    rewards, mask, obs = block([50, 50, 50, 50], dims=20)
    obs = 1e-6 * obs.double() + (torch.arange(50) >= 48)[:, None]
    args = rewards, mask, obs
    torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-8, atol=1e-8)


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


# ---- what bugs planted in nearest_mean had left green
def test_an_episode_far_from_all_others_is_nearer_than_padding():
    """A single step some 20 standard deviations away, and the padding of its row."""
    rewards, mask, obs = block([150, 1, 90, 150], [40, 7, 1, 60])
    obs[0, 1, 0] = 1e3
    for k in (0, 4):
        args = rewards, mask, obs, 0.9, k
        torch.testing.assert_close(compute(*args), oracle(*args), rtol=1e-9, atol=1e-12)


def test_the_search_does_not_hold_all_distances():
    """Of 4800 steps these are 180 MB."""
    x, mask, obs = block([600] * 8)
    tracemalloc.start()
    grpo_rtg.nearest_mean(x, obs, mask, 4)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6


@pytest.mark.parametrize("k", [1, 2, 4])
def test_rounding_does_not_choose_between_equally_far_episodes(k):
    """Integer observations, of which an episode's nearest is always that of the same time."""
    for seed in range(8):
        rewards, mask, _ = block([6, 4, 5, 6], [3, 6, 2, 4], seed=seed)
        generator = torch.Generator().manual_seed(seed)
        jitter = torch.randint(-2, 3, (*mask.shape, 1), generator=generator)
        obs = 10 * mask.cumsum(-1)[..., None].double() + jitter
        b = subtracted(rewards, mask, obs, k=k)
        for other in (obs * 7 + 3, obs / 3 - 100):
            found = subtracted(rewards, mask, other, k=k)
            torch.testing.assert_close(found, b, rtol=1e-4, atol=1e-4)
        members = [2, 0, 3, 1]
        moved = subtracted(*(x[:, members] for x in (rewards, mask, obs)), k=k)
        torch.testing.assert_close(moved, b[:, members], rtol=1e-4, atol=1e-4)


# ---- docs/benchmark/neighbor_choices.py
@pytest.fixture
def choices(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(grpo_rtg.__file__).parent / "docs" / "benchmark"))
    return importlib.import_module("neighbor_choices")


@pytest.mark.parametrize("k", [0, 1, 3, 16])
def test_the_program_of_the_ablations_has_this_baseline(k, choices):
    for seed in range(6):
        x, mask, obs = random_block(seed)
        expected = grpo_rtg.nearest_mean(x, obs, mask, k)[mask]
        torch.testing.assert_close(choices.nearest_mean(x, obs, mask, k)[mask], expected)
    x, mask, obs = block([60, 150, 111, 9], [13, 1, 70, 90], dims=4)
    obs[:, :, 0] = obs[:, :1, 0]  # as near as the k-th
    expected = grpo_rtg.nearest_mean(x, obs, mask, k)[mask]
    torch.testing.assert_close(choices.nearest_mean(x, obs, mask, k)[mask], expected)


CHOICES = [  # of the program, of the oracle
    ({"power": 0.0}, {"power": 0}),
    ({"power": 1.0}, {"power": 1}),
    ({"power": 4.0}, {"power": 4}),
    ({"steps": 1}, {"steps": 1}),
    ({"steps": 6}, {"steps": 6}),
    ({"time_weight": 0.0}, {"time_weight": 0}),
    ({"time_weight": 3.0}, {"time_weight": 3}),
    ({"candidates": "group"}, {"own": True}),
    ({"candidates": "group", "power": 1.0}, {"own": True, "power": 1}),
    ({"candidates": "group", "steps": 5}, {"own": True, "steps": 5}),
    ({"time_weight": 0.5, "steps": 5}, {"time_weight": 0.5, "steps": 5}),
]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(("theirs", "ours"), CHOICES)
def test_and_others(theirs, ours, k, choices):
    x, mask, obs = block([5, 9, 7, 4], [8, 2, 6, 6], dims=3)
    expected = padded(baselines(x, mask, obs, 0.0, k, **ours))[mask]
    found = choices.nearest_mean(x, obs, mask, k, **theirs)[mask]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, grpo_rtg.nearest_mean(x, obs, mask, k)[mask])


def test_a_run_of_the_program(choices, cli, monkeypatch):
    monkeypatch.setattr(grpo_rtg, "nearest_mean", grpo_rtg.nearest_mean)  # which it replaces
    watched = Mock(wraps=choices.nearest_mean)
    monkeypatch.setattr(choices, "nearest_mean", watched)
    args = ["--power", 1, "--steps", 3, "--time-weight", 0.5, "--candidates", "group"]
    args += [*TINY["grpo_rtg"], "--baseline", "neighbors", "--num-neighbors", 2]
    status, out, err = cli("neighbor_choices", *args)
    assert status == 0 and "evaluation, 2 episodes" in out, err
    options = {"power": 1.0, "steps": 3, "time_weight": 0.5, "candidates": "group"}
    assert watched.called
    for call in watched.call_args_list:
        assert call.args[3] == 2 and call.kwargs == options
