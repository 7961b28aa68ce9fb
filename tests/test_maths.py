"""The formulas against numbers by hand, and loops over Python's floats from the equations alone."""

import itertools
import math
from functools import partial
from statistics import fmean as mean

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn
from torch.distributions import Categorical, Independent

import grpo_outcome
import grpo_process
import grpo_rtg
import ppo


def to_go(episode, gamma):
    steps = range(len(episode))
    return [sum(gamma ** (j - t) * episode[j] for j in steps[t:]) for t in steps]


def pooled_mean(group):
    pooled = mean(sum(group, []))
    return [[pooled for _ in episode] for episode in group]


def normalize(group, baselines, norm_std, size=None):
    """(x - b) / sample std of x - b; exactly 0 where that is nothing for the size of the x."""
    centred = [[x - b for x, b in zip(*pair)] for pair in zip(group, baselines)]
    pooled = sum(centred, [])
    std = math.sqrt(sum(c * c for c in pooled) / (len(pooled) - 1))
    tied = std <= 1e-7 * (size or max(map(abs, sum(group, []))))
    divisor = math.inf if tied else std if norm_std else 1.0
    return [[c / divisor for c in episode] for episode in centred]


def outcome_loop(group, gamma, norm_std):
    returns = [[to_go(episode, gamma)[0]] for episode in group]
    sizes = [to_go([*map(abs, episode)], gamma)[0] for episode in group]
    scores = normalize(returns, pooled_mean(returns), norm_std, max(sizes))
    return [score * len(episode) for score, episode in zip(scores, group)]


def process_loop(group, gamma, norm_std):
    normalized = normalize(group, pooled_mean(group), norm_std)
    return [to_go(episode, gamma) for episode in normalized]


def rtg_loop(group, gamma, norm_std, baseline):
    returns = [to_go(episode, gamma) for episode in group]
    baselines = pooled_mean(returns)
    if baseline == "timestep":  # only the members still alive at t
        means = [mean([x[t] for x in returns if len(x) > t]) for t in range(max(map(len, returns)))]
        baselines = [means[: len(episode)] for episode in group]
    return normalize(returns, baselines, norm_std)


rtg = grpo_rtg.compute_advantages
VARIANTS = {  # each with its loop
    "outcome": (grpo_outcome.compute_advantages, outcome_loop),
    "process": (grpo_process.compute_advantages, process_loop),
    "group": (partial(rtg, baseline="group"), partial(rtg_loop, baseline="group")),
    "timestep": (partial(rtg, baseline="timestep"), partial(rtg_loop, baseline="timestep")),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def pad(groups, padding=99.0, dtype=torch.float32):
    """Lists of episodes as rewards [K, G, T] and mask [K, G, T]; the padding must never count."""
    T = max(len(episode) for group in groups for episode in group)
    rewards = [[episode + [padding] * (T - len(episode)) for episode in group] for group in groups]
    mask = [[[t < len(episode) for t in range(T)] for episode in group] for group in groups]
    return torch.tensor(rewards, dtype=dtype), torch.tensor(mask)


def random_groups(seed):
    """Dense, sparse or CartPole-like float32 rewards of unequal lengths; and two groups of ties."""
    rng = np.random.default_rng(seed)
    K, G, T = rng.integers(1, 4), rng.integers(2, 6), rng.integers(2, 10)
    draw = [lambda n: rng.normal(0.5, 2, n), lambda n: rng.integers(0, 2, n), np.ones][seed % 3]
    lengths = [[T, rng.integers(1, T), *rng.integers(1, T + 1, G - 2)] for _ in range(K)]
    groups = [[draw(n).astype(np.float32).tolist() for n in group] for group in lengths]
    return [*groups, [[0.0, 0.0]] * G, [[1.0, 2**-24 - 1]] + [[0.0]] * (G - 1)]


@each_variant
@pytest.mark.parametrize("norm_std", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_advantages_match_the_loops(variant, norm_std, gamma):
    compute, loop = VARIANTS[variant]
    for seed in range(21):
        groups = random_groups(seed)
        expected, _ = pad([loop(group, gamma, norm_std) for group in groups], 0.0, torch.float64)
        padding = [99.0, math.nan][seed % 2]
        advantages = compute(*pad(groups, padding), gamma, norm_std)
        torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-12)


RTG_GROUP = [[5.0, 2.0], [-5.0, 7.0, -2.0]]  # to go with gamma = 1/2: 6 2 | -2 6 -2
BY_HAND = {  # gamma = 1/2; variant: group, advantages before the division, std
    # R = 2+4/2, 1+2/2, 0 = 4 2 0: mean 2, std sqrt((4+0+4)/2)
    "outcome": ([[2.0, 4.0], [1.0, 2.0, 0.0], [0.0]], [[2.0, 2.0], [0.0, 0.0, 0.0], [-2.0]], 2.0),
    # pooled mean 1, centred 2 0 | -2 2 -2, std sqrt(16/4); to go: 2+0, 0 | -2+2/2-2/4, 2-2/2, -2
    "process": ([[3.0, 1.0], [-1.0, 3.0, -1.0]], [[2.0, 0.0], [-1.5, 1.0, -2.0]], 2.0),
    # mean 2, std sqrt((16+0+16+16+16)/4)
    "group": (RTG_GROUP, [[4.0, 0.0], [-4.0, 4.0, -4.0]], 4.0),
    # means (6-2)/2, (2+6)/2 and, alone, -2; std sqrt((16+4+16+4+0)/4)
    "timestep": (RTG_GROUP, [[4.0, -2.0], [-4.0, 2.0, 0.0]], math.sqrt(10)),
}


@each_variant
def test_advantages_by_hand(variant):
    compute, _ = VARIANTS[variant]
    group, centred, std = BY_HAND[variant]
    expected, _ = pad([centred], 0.0, torch.float64)
    for norm_std, divisor in ((True, std), (False, 1.0)):
        advantages = compute(*pad([group]), 0.5, norm_std)
        torch.testing.assert_close(advantages, expected / divisor, rtol=1e-12, atol=1e-12)


@each_variant
def test_units_of_rewards_do_not_matter(variant):
    """Nor, with equal lengths or pooled steps, does a constant: float32 has steps of 64 there."""
    compute, _ = VARIANTS[variant]
    rewards, mask = pad(random_groups(0), dtype=torch.float64)
    for unit in (1e-12, 1e12):  # an epsilon in the divisor would show
        given, expected = (compute(x, mask, 0.9) for x in (unit * rewards, rewards))
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=0)
    mask = mask if variant == "process" else torch.ones_like(mask)
    gamma = 0.0 if variant == "group" else 0.9  # whose mean is over returns-to-go of all t
    given, expected = (compute(x, mask, gamma) for x in (1e9 + 1e5 * rewards, rewards))
    torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", ["outcome", "process", "timestep"])
def test_ties_give_exactly_zero(variant):
    """500 equal rewards of 0.1 must not become noise divided by a tiny number, as in float32."""
    compute, _ = VARIANTS[variant]
    for members in (2, 3, 7):
        lengths = [500 - i * (variant == "process") for i in range(members)]
        rewards, mask = pad([[[0.1] * length for length in lengths]])
        for gamma, norm_std in itertools.product((0.99, 1.0), (True, False)):
            assert (compute(rewards, mask, gamma, norm_std) == 0).all()


@each_variant
def test_rounding_is_a_tie_and_a_small_spread_counts(variant):
    compute, _ = VARIANTS[variant]
    rewards, mask = pad([[[0.1] * 4] * 3])
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(1.0))  # one float32 further
    assert (compute(rewards, mask, 0.0) == 0).all()
    rewards[0, 2, 0] += 1e-4
    assert compute(rewards, mask, 0.0).abs().max() > 1


CLIP, KL_COEF, ENT_COEF, VF_COEF = 0.2, 0.3, 0.05, 0.7
KINDS = ["step", "trajectory", "ppo"]  # GRPO's two --loss-agg, and PPO


class Table(nn.Module):
    """Policy and values for obs [B, 1], the numbers of states."""

    def __init__(self, table):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(table[:, :-1]))
        self.critic = nn.Embedding.from_pretrained(torch.tensor(table[:, -1:]), freeze=False)

    def forward(self, obs):
        return Independent(Categorical(logits=self.logits[obs]), 1)

    def value(self, obs):
        return self.critic(obs)[:, 0, 0]

    def table(self):
        return torch.cat([*self.parameters()], dim=1).detach()


def random_steps(seed):
    """A table, and 2 x 3 episodes of steps with ratios to π_old and π_ref away from 1."""
    rng = np.random.default_rng(seed)
    episodes = [[] for _ in range(6)]
    for episode in episodes:
        for _ in range(rng.integers(1, 12)):
            step = {"obs": rng.integers(3), "actions": rng.integers(3)}
            step |= {name: rng.normal() for name in ("advantages", "returns")}
            step |= {name: rng.normal(-1, 0.5) for name in ("old_log_probs", "ref_log_probs")}
            episode.append(step)
    return 0.5 * rng.normal(size=(3, 4)), episodes


def make_batch(episodes, kind):
    """The steps as the losses take them."""
    steps = sum(episodes, [])
    batch = {name: torch.tensor(np.array([step[name] for step in steps])) for name in steps[0]}
    lengths = torch.tensor([len(episode) for episode in episodes]).view(2, 3, 1)
    mask = torch.arange(lengths.max()) < lengths
    batch["weights"] = grpo_rtg.step_weights(mask, kind.replace("ppo", "step"))[mask]
    return batch | {name: batch[name][:, None] for name in ("obs", "actions")}


def terms(step, table):
    """What the objectives are means of, for one step."""
    *logits, value = table[step["obs"]]
    log_z = math.log(sum(math.exp(x) for x in logits))
    log_probs = [x - log_z for x in logits]
    log_prob = log_probs[step["actions"]]
    ratio = math.exp(log_prob) / math.exp(step["old_log_probs"])
    clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
    ref_ratio = math.exp(step["ref_log_probs"]) / math.exp(log_prob)
    return {
        "ratio": ratio,
        "policy_loss": -min(ratio * step["advantages"], clipped * step["advantages"]),
        "kl": ref_ratio - math.log(ref_ratio) - 1,
        "entropy": -sum(math.exp(x) * x for x in log_probs),
        "value_loss": 0.5 * (value - step["returns"]) ** 2,
        "approx_kl": ratio - 1 - math.log(ratio),
        "clipfrac": float(ratio != clipped),
    }


def loss_loop(kind, episodes, table):
    """Minus Eq. 3 with Eq. 4 and an entropy bonus, or minus PPO's Eq. 9; and all means."""
    in_episodes = [[terms(step, table) for step in episode] for episode in episodes]
    steps = sum(in_episodes, [])
    means = {name: mean([step[name] for step in steps]) for name in steps[0]}
    if kind == "trajectory":  # 1/(K G) Σ_i 1/|o_i| Σ_t
        for name in ("policy_loss", "kl", "entropy"):
            means[name] = mean([mean([step[name] for step in x]) for x in in_episodes])
    more = VF_COEF * means["value_loss"] if kind == "ppo" else KL_COEF * means["kl"]
    return means["policy_loss"] + more - ENT_COEF * means["entropy"], means


def loss_of(kind, policy, batch, clip=CLIP, kl=KL_COEF, ent=ENT_COEF, vf=VF_COEF):
    if kind == "ppo":
        args = ppo.Args(clip_coef=clip, ent_coef=ent, vf_coef=vf)
        return ppo.ppo_loss(policy, batch, args)
    return grpo_rtg.grpo_loss(
        policy, batch, grpo_rtg.Args(clip_coef=clip, kl_coef=kl, ent_coef=ent)
    )


def gradient(policy, loss):
    slopes = torch.autograd.grad(loss, policy.parameters(), materialize_grads=True)
    return torch.cat(slopes, dim=1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_match_the_loop(kind, h=1e-6):
    for seed in range(3):
        table, episodes = random_steps(seed)
        policy = Table(table)
        loss, metrics = loss_of(kind, policy, make_batch(episodes, kind))
        expected, means = loss_loop(kind, episodes, table)
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        for name, value in metrics.items():
            assert value.item() == pytest.approx(means[name.removeprefix("losses/")], rel=1e-6)

        # Every case of the clipped surrogate: ratio below, inside, above; advantage of either sign.
        cases = [(terms(s, table)["ratio"], s["advantages"]) for s in sum(episodes, [])]
        assert len({(r > 1 - CLIP, r > 1 + CLIP, a > 0) for r, a in cases}) == 6
        shifts = h * np.eye(table.size).reshape(-1, *table.shape)
        ends = [[loss_loop(kind, episodes, table + x)[0] for x in (d, -d)] for d in shifts]
        slopes = [(up - down) / (2 * h) for up, down in ends]
        np.testing.assert_allclose(gradient(policy, loss).ravel(), slopes, rtol=1e-6, atol=1e-8)


def test_kl_and_its_gradient_are_exact():
    """π_θ = (1, 2, 3)/6 and π_ref = (3, 2, 1)/6, each action as often as π_θ takes it.

    The mean of Eq. 4 is KL(π_θ, π_ref) = Σ π_θ log(π_θ/π_ref) = log(3)/3, its derivative by the
    logits is π_θ - π_ref. The other way round the mean would differ, of detached ones all slopes.
    """
    policy = Table(np.log([[1.0, 2, 3, 1]]))
    actions = torch.arange(3)[:, None]
    batch = {name: torch.zeros(3).double() for name in ("old_log_probs", "advantages")}
    batch |= {"obs": 0 * actions, "actions": actions, "weights": 3 * torch.tensor([1, 2, 3]) / 6}
    batch["ref_log_probs"] = (torch.tensor([3, 2, 1]).double() / 6).log()
    loss, metrics = loss_of("step", policy, batch, kl=1.0, ent=0.0)
    assert metrics["losses/kl"].item() == pytest.approx(math.log(3) / 3)
    assert gradient(policy, loss)[0].tolist() == pytest.approx([-1 / 3, 0, 1 / 3, 0], abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_far_away_policies_give_finite_losses_and_gradients(kind):
    """exp(1000) overflows: log-ratios are bounded before it, both to π_old and to π_ref."""
    table, episodes = random_steps(0)
    policy = Table(table)
    batch = make_batch(episodes, kind)
    for name, far in itertools.product(("old_log_probs", "ref_log_probs"), (-1000, 1000)):
        loss, metrics = loss_of(kind, policy, batch | {name: batch[name] + far})
        assert np.isfinite([loss.item(), *metrics.values()]).all()
        assert np.isfinite(gradient(policy, loss)).all()
    with pytest.raises(AssertionError):  # to [B, B] they would broadcast
        loss_of(kind, policy, batch | {"advantages": batch["advantages"][:, None]})


@pytest.mark.parametrize("kind", ["step", "ppo"])
@pytest.mark.parametrize("limit", [0.3, 0.0])
def test_an_update_is_descents_by_the_clipped_gradient(kind, limit, monkeypatch):
    """Each pass in new minibatches of about 5 steps. The critic's gradient is clipped by itself."""
    module, name = (ppo, "ppo_loss") if kind == "ppo" else (grpo_rtg, "grpo_loss")
    loss_fn = getattr(module, name)
    seen = []
    monkeypatch.setattr(module, name, lambda *x, **y: seen.append(x[1]) or loss_fn(*x, **y))
    table, episodes = random_steps(0)
    batch = make_batch(episodes, kind)
    options = {"update_epochs": 3, "minibatch_size": 5, "max_grad_norm": limit, "target_kl": 0.0}
    options |= {"vf_coef": VF_COEF} if kind == "ppo" else {"kl_coef": KL_COEF}
    options |= {"clip_coef": CLIP, "ent_coef": ENT_COEF}
    torch.manual_seed(0)
    policy = Table(table)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    updates = module.update(policy, optimizer, batch, module.Args(**options))
    number = round(len(batch["obs"]) / 5)
    assert len(seen) == 3 * number and not torch.equal(seen[0]["obs"], seen[number]["obs"])
    once = torch.cat([x["returns"] for x in seen[:number]])
    assert sorted(once.tolist()) == sorted(batch["returns"].tolist())
    norms = []
    for minibatch in seen.copy():
        before = Table(table)
        slope = gradient(before, loss_of(kind, before, minibatch)[0])
        norms.append(np.linalg.norm(slope[:, :-1]))
        for part in (slope[:, :-1], slope[:, -1:]) if limit else ():
            part /= max(1, np.linalg.norm(part) / limit)
        table = table - 0.1 * slope
    assert min(norms) < 0.3 < max(norms)
    np.testing.assert_allclose(policy.table(), table, rtol=1e-5)
    assert [x["losses/grad_norm"] for x in updates] == pytest.approx(norms)  # as they were

    module.update(policy, optimizer, batch, module.Args(**options | {"target_kl": 1e-9}))
    np.testing.assert_allclose(policy.table(), table, rtol=1e-5)  # it is far from π_old


@pytest.mark.parametrize(("gae_lambda", "expected"), [
    # one-step TD errors: 1+2/2-4, 2+6/2-2 and 3-6 if terminated, else 3+8/2-6
    (0.0, [[-2, 3, -3], [-2, 3, 1], [-2, 3, 1], [-2, 3, -3], [-3, 3, -3]]),
    # discounted returns less V: 1+2/2+3/4-4, 2+3/2-2, 3-6; what goes on adds 8/8, 8/4, 8/2
    (1.0, [[-1.25, 1.5, -3], [-0.25, 3.5, 1], [-0.25, 3.5, 1], [-2, 1.5, -3], [-3, 1.5, -3]]),
])  # fmt: skip
def test_gae_by_hand(gae_lambda, expected):
    """γ = 1/2: terminated, truncated, cut by the rollout; truncated or terminated at once, too."""
    rewards, values, next_values = torch.tensor([[1.0, 2, 3], [4, 2, 6], [2, 6, 8]])
    terminated = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1]]).bool().T
    done = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 0], [1, 0, 1], [1, 0, 1]]).bool().T
    columns = [x[:, None].expand(3, 5) for x in (rewards, values, next_values)]
    advantages, returns = ppo.compute_gae(*columns, terminated, done, 0.5, gae_lambda)
    assert advantages.T.tolist() == expected  # exact in float32: all are binary fractions
    assert torch.equal(returns, advantages + columns[1])


def make_policy(action_space, **options):
    torch.manual_seed(0)
    obs_space = Box(-np.inf, np.inf, (3,))
    return grpo_rtg.Policy(obs_space, action_space, grpo_rtg.Args(hidden_size=8, **options))


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([2, 4, 3]), MultiBinary(2)])
def test_probabilities_of_all_actions_sum_to_1(space):
    """Options that a choice lacks are never chosen, even if the network likes them best."""
    sizes = grpo_rtg.num_options(space).tolist()
    policy = make_policy(space)
    with torch.no_grad():
        policy.net[-1].bias.normal_()
        policy.net[-1].bias.view(len(sizes), -1)[policy.padding < 0] = 1e4
    everything = torch.tensor(list(itertools.product(*map(range, sizes))))
    distribution = policy(torch.ones(1, 3))
    log_probs = distribution.log_prob(everything)
    assert log_probs.exp().sum().item() == pytest.approx(1)
    assert distribution.entropy().item() == pytest.approx(-(log_probs.exp() @ log_probs).item())
    for greedy in (False, True):
        assert (policy.act(np.ones((1000, 3), np.float32), greedy) < sizes).all()


def test_the_gaussian_of_a_box():
    """Log-probabilities [B] are sums over the two numbers of an action."""
    policy = make_policy(Box(-2, 2, (2, 1)), log_std_init=0.5)
    obs = torch.randn(4, 3)
    z = torch.randn(4, 2)
    log_probs = policy(obs).log_prob(policy.net(obs) + math.exp(0.5) * z)
    expected = [-(x * x + y * y) / 2 - 1 - math.log(2 * math.pi) for x, y in z.tolist()]
    assert log_probs.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_box_actions_are_scaled_and_never_leave_the_space(dtype):
    space = Box(0.1, 5, (1,), dtype)
    outputs = np.float32([-1, 0, 1, *np.random.default_rng(0).normal(size=500)])
    given = make_policy(space).to_env(outputs[:, None])
    assert all(space.contains(action) for action in given)
    low, middle, high = np.concatenate(given[:3])
    assert low == space.low and high == space.high and middle == pytest.approx(2.55, rel=1e-3)
    assert (np.concatenate(given) == space.high).sum() > 50  # clipped


def test_box_actions_without_bounds_are_taken_as_they_are():
    biggest = np.finfo(np.float32).max
    for bound in (biggest, np.inf):
        [action] = make_policy(Box(-bound, bound, (1,))).to_env(np.float32([[7.5]]))
        assert action == 7.5
    orders = make_policy(Box(-120, 120, (1,), np.int8))  # wider than its own type
    assert orders.to_env(np.float32([-1, 0.505, 1])).ravel().tolist() == [-120, 61, 120]
    half = Box(np.float32([-2, -2]), np.float32([2, np.inf]))
    given = make_policy(half).to_env(np.float32([[0.5, 7], [0.5, -3]]))
    assert np.array_equal(given, [[1, 7], [1, -2]])


def test_observation_statistics_are_the_pooled_ones(offset=1.7e9):
    """Of iterations of unequal length and level; a time stamp needs float64."""
    policy = make_policy(Discrete(2), norm_obs=True)
    rng = np.random.default_rng(0)
    iterations = [rng.normal(i, 1 + i, size=(n, 3)) for i, n in enumerate((50, 400, 7))]
    for obs in iterations:
        policy.update_obs_stats(torch.from_numpy(offset + obs))
    pooled = np.concatenate(iterations)
    np.testing.assert_allclose(policy.obs_mean - offset, pooled.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(policy.obs_var, pooled.var(axis=0), rtol=1e-6)
    expected = ((pooled - pooled.mean(axis=0)) / pooled.std(axis=0)).clip(-10, 10)
    obs = offset + pooled
    np.testing.assert_allclose(policy.normalize(torch.from_numpy(obs)), expected, atol=1e-5)
    assert np.array_equal(obs, offset + pooled)  # untouched
    assert (policy.normalize(torch.full((1, 3), 1e30)) == 10).all()
    assert policy.normalize(torch.ones(1, 3).bool()).isfinite().all()
