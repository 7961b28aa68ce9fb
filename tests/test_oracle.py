"""Independent oracle: the formulas of DeepSeekMath section 4.1 and of GAE as loops over plain
Python floats, written from the equations alone, against what the scripts compute.
"""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import grpo_outcome
import grpo_process
import grpo_rtg
import ppo

CLIP, KL_COEF, ENT_COEF, VF_COEF = 0.2, 0.3, 0.05, 0.7


# ---- Advantages: a group is a list of episodes, an episode a list of rewards ----


def mean(values):
    return sum(values) / len(values)


def to_go(episode, gamma):
    steps = range(len(episode))
    return [sum(gamma ** (j - t) * episode[j] for j in steps[t:]) for t in steps]


def normalize(values, baselines, norm_std):
    """(value - baseline) / sample std; exactly 0 where the values have no spread for their size."""
    centred = [value - baseline for value, baseline in zip(values, baselines)]
    std = math.sqrt(sum(c * c for c in centred) / (len(centred) - 1))
    if std <= 1e-6 * max(abs(value) for value in values):
        return [0.0 for _ in centred]
    return [c / std if norm_std else c for c in centred]


def normalize_steps(group, baselines, norm_std):
    """The same over all the steps of a group, given and returned episode by episode."""
    scores = iter(normalize(sum(group, []), sum(baselines, []), norm_std))
    return [[next(scores) for _ in episode] for episode in group]


def pooled_mean(group):
    pooled = mean(sum(group, []))
    return [[pooled for _ in episode] for episode in group]


def outcome_oracle(group, gamma, norm_std):
    returns = [to_go(episode, gamma)[0] for episode in group]
    scores = normalize(returns, [mean(returns) for _ in group], norm_std)
    return [[score for _ in episode] for score, episode in zip(scores, group)]


def process_oracle(group, gamma, norm_std):
    normalized = normalize_steps(group, pooled_mean(group), norm_std)
    return [to_go(episode, gamma) for episode in normalized]


def rtg_oracle(group, gamma, norm_std, baseline):
    returns = [to_go(episode, gamma) for episode in group]
    baselines = pooled_mean(returns)
    if baseline == "timestep":  # only the members still alive at t
        means = [mean([x[t] for x in returns if len(x) > t]) for t in range(max(map(len, returns)))]
        baselines = [means[: len(episode)] for episode in group]
    return normalize_steps(returns, baselines, norm_std)


VARIANTS = {
    "outcome": (grpo_outcome, outcome_oracle, {}),
    "process": (grpo_process, process_oracle, {}),
    "rtg-group": (grpo_rtg, rtg_oracle, {"baseline": "group"}),
    "rtg-timestep": (grpo_rtg, rtg_oracle, {"baseline": "timestep"}),
}


def pad(groups, padding=99.0, dtype=torch.float32):
    """Lists of episodes -> rewards [K, G, T], mask [K, G, T]; the padding must never count."""
    T = max(len(episode) for group in groups for episode in group)
    rewards = [[episode + [padding] * (T - len(episode)) for episode in group] for group in groups]
    mask = [[[t < len(episode) for t in range(T)] for episode in group] for group in groups]
    return torch.tensor(rewards, dtype=dtype), torch.tensor(mask)


def random_groups(seed):
    """Dense, sparse or CartPole-like rewards, float32, of unequal lengths; and a group of ties."""
    rng = np.random.default_rng(seed)
    K, G, T = rng.integers(1, 4), rng.integers(2, 6), rng.integers(2, 10)
    draw = [lambda n: rng.normal(0.5, 2, n), lambda n: rng.integers(0, 2, n), np.ones][seed % 3]
    lengths = [[T, rng.integers(1, T), *rng.integers(1, T + 1, G - 2)] for _ in range(K)]
    groups = [[draw(n).astype(np.float32).tolist() for n in group] for group in lengths]
    return [*groups, [[0.0, 0.0]] * G]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("norm_std", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_advantages_match_the_loops(variant, norm_std, gamma):
    module, oracle, kwargs = VARIANTS[variant]
    for seed in range(21):
        groups = random_groups(seed)
        expected = [oracle(group, gamma, norm_std, **kwargs) for group in groups]
        expected, _ = pad(expected, 0.0, torch.float64)  # zeros in the padding
        advantages = module.compute_advantages(*pad(groups), gamma, norm_std, **kwargs)
        torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-12)


RTG_GROUP = [[5.0, 2.0], [-5.0, 7.0, -2.0]]  # to go with gamma = 1/2: 6 2 | -2 6 -2
HAND_WORKED = {  # gamma = 1/2; variant: group, advantages before the division, std
    # R = 2+4/2, 1+2/2, 0 = 4 2 0: mean 2, std sqrt((4+0+4)/2)
    "outcome": ([[2.0, 4.0], [1.0, 2.0, 0.0], [0.0]], [[2.0, 2.0], [0.0, 0.0, 0.0], [-2.0]], 2.0),
    # pooled mean 1, centred 2 0 | -2 2 -2, std sqrt(16/4); to go: 2+0, 0 | -2+2/2-2/4, 2-2/2, -2
    "process": ([[3.0, 1.0], [-1.0, 3.0, -1.0]], [[2.0, 0.0], [-1.5, 1.0, -2.0]], 2.0),
    # mean 2, std sqrt((16+0+16+16+16)/4)
    "rtg-group": (RTG_GROUP, [[4.0, 0.0], [-4.0, 4.0, -4.0]], 4.0),
    # means (6-2)/2, (2+6)/2 and, alone, -2; std sqrt((16+4+16+4+0)/4)
    "rtg-timestep": (RTG_GROUP, [[4.0, -2.0], [-4.0, 2.0, 0.0]], math.sqrt(10)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_advantages_by_hand(variant):
    module, _, kwargs = VARIANTS[variant]
    group, centred, std = HAND_WORKED[variant]
    expected, _ = pad([centred], 0.0, torch.float64)
    for norm_std, divisor in ((True, std), (False, 1.0)):
        advantages = module.compute_advantages(*pad([group]), 0.5, norm_std, **kwargs)
        torch.testing.assert_close(advantages, expected / divisor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss_agg", ["trajectory", "step"])
def test_weights_average_as_they_say(loss_agg):
    """Eq. 3's 1/K Σ_k 1/G Σ_i 1/|o_i| Σ_t, or the mean over all steps."""
    for seed in range(9):
        groups = random_groups(seed)
        values, mask = pad(groups, dtype=torch.float64)
        weights = grpo_outcome.step_weights(mask, loss_agg)
        by_trajectory = mean([mean([mean(episode) for episode in group]) for group in groups])
        by_step = mean([x for group in groups for episode in group for x in episode])
        expected = by_trajectory if loss_agg == "trajectory" else by_step
        assert (weights * values)[mask].mean().item() == pytest.approx(expected, abs=1e-12)
        assert weights[mask].mean().item() == pytest.approx(1)


# ---- Losses: values in float32 as in training, gradients in float64, by differences ----

# Each space with the numbers of options that an action's choices have.
SPACES = {
    "Discrete": (Discrete(3), [3]),
    "MultiDiscrete": (MultiDiscrete([2, 4, 3]), [2, 4, 3]),
    "MultiBinary": (MultiBinary(2), [2, 2]),
    "Box": (Box(-2, 2, (2,)), []),
}


def gaussian(value, mean, log_std):
    """Log-density at value, and entropy."""
    z = (value - mean) / math.exp(log_std)
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    return -0.5 * z * z - log_std - half_log_2pi, 0.5 + half_log_2pi + log_std


def categorical(choice, logits):
    """Log-probability of choice, and entropy."""
    log_z = math.log(sum(math.exp(x) for x in logits))
    return logits[choice] - log_z, -sum(math.exp(x - log_z) * (x - log_z) for x in logits)


def log_prob_and_entropy(policy, sizes, obs, actions):
    """Pairs, one for each step: of an action's parts, each independent of the others, the sums."""
    pairs = []
    for row, action in zip(policy.net(obs).tolist(), actions.tolist(), strict=True):
        if sizes:
            logits = [row[i * max(sizes) :][:n] for i, n in enumerate(sizes)]
            parts = map(categorical, action, logits)
        else:
            parts = map(gaussian, action, row, policy.log_std.tolist())
        pairs.append(tuple(map(sum, zip(*parts))))
    return pairs


def terms(policy, sizes, batch):
    """For each step of the batch the terms of the objective, as a dict of floats."""
    pairs = log_prob_and_entropy(policy, sizes, batch["obs"], batch["actions"])
    steps = [dict(zip(batch, row)) for row in zip(*(column.tolist() for column in batch.values()))]
    for step, (log_prob, entropy) in zip(steps, pairs, strict=True):
        ratio = math.exp(log_prob - step["old_log_probs"])
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        step["surrogate"] = min(ratio * step["advantages"], clipped * step["advantages"])
        log_ref_ratio = step["ref_log_probs"] - log_prob
        step["kl"] = math.exp(log_ref_ratio) - log_ref_ratio - 1
        step["approx_kl"] = ratio - 1 - math.log(ratio)
        step["clipfrac"] = float(ratio != clipped)
        step |= {"ratio": ratio, "entropy": entropy}
    return steps


def grpo_oracle(policy, sizes, batch):
    """The loss and the metrics by Eq. 3 and 4."""
    steps = terms(policy, sizes, batch)
    names = ("surrogate", "kl", "entropy")
    surrogate, kl, entropy = (mean([s["weights"] * s[name] for s in steps]) for name in names)
    metrics = {"policy_loss": -surrogate, "kl": kl, "entropy": entropy}
    metrics |= {name: mean([s[name] for s in steps]) for name in ("approx_kl", "clipfrac")}
    return -(surrogate - KL_COEF * kl + ENT_COEF * entropy), metrics


def ppo_oracle(policy, sizes, batch):
    """The loss and the metrics by PPO's Eq. 9."""
    steps = terms(policy, sizes, batch)
    names = ("surrogate", "entropy", "approx_kl", "clipfrac")
    metrics = {name: mean([s[name] for s in steps]) for name in names}
    metrics["policy_loss"] = -metrics.pop("surrogate")
    pairs = zip(policy.critic(batch["obs"]).tolist(), batch["returns"].tolist(), strict=True)
    metrics["value_loss"] = mean([0.5 * (value - target) ** 2 for [value], target in pairs])
    loss = metrics["policy_loss"] + VF_COEF * metrics["value_loss"] - ENT_COEF * metrics["entropy"]
    return loss, metrics


LOSSES = {
    "grpo": (grpo_rtg.grpo_loss, grpo_rtg.Policy, grpo_oracle, (CLIP, KL_COEF, ENT_COEF)),
    "ppo": (ppo.ppo_loss, ppo.ActorCritic, ppo_oracle, (CLIP, ENT_COEF, VF_COEF)),
}
LOSSES_AND_SPACES = [*(("grpo", space) for space in SPACES), ("ppo", "Discrete"), ("ppo", "Box")]


def policy_and_batch(policy_class, space, seed, dtype=torch.float32, B=36):
    """A policy away from its initialisation, where outputs are near 0, and ratios away from 1."""
    torch.manual_seed(seed)
    action_space, sizes = SPACES[space]
    policy = policy_class(Box(-5, 5, (3,)), action_space, ppo.Args(hidden_size=4)).to(dtype)
    theta = parameters_to_vector(policy.parameters())
    vector_to_parameters(0.5 * torch.randn_like(theta), policy.parameters())
    if dtype == torch.float64:  # though the policy makes its inputs float32
        for net in (policy.net, getattr(policy, "critic", policy.net)):
            net.register_forward_pre_hook(lambda _, args: args[0].double())
    action_space.seed(seed)
    actions = torch.tensor(np.array([action_space.sample() for _ in range(B)])).view(B, -1)
    batch = {"obs": torch.randn(B, 3), "actions": actions}
    pairs = log_prob_and_entropy(policy, sizes, **batch)
    log_probs = torch.tensor([log_prob for log_prob, _ in pairs], dtype=dtype)
    batch["old_log_probs"] = log_probs + 0.5 * torch.randn(B, dtype=dtype)
    batch["ref_log_probs"] = log_probs + 0.5 * torch.randn(B, dtype=dtype)
    batch["weights"] = 0.2 + torch.rand(B, dtype=dtype)
    batch |= {name: torch.randn(B, dtype=dtype) for name in ("advantages", "returns")}
    return policy, sizes, batch


@pytest.mark.parametrize(("script", "space"), LOSSES_AND_SPACES)
def test_loss_and_metrics(script, space):
    loss_fn, policy_class, oracle, coefs = LOSSES[script]
    for seed in range(5):
        policy, sizes, batch = policy_and_batch(policy_class, space, seed)
        loss, metrics = loss_fn(policy, batch, *coefs)
        expected_loss, expected = oracle(policy, sizes, batch)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        metrics = {name.removeprefix("losses/"): x.item() for name, x in metrics.items()}
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("script", "space"), LOSSES_AND_SPACES)
def test_loss_gradient(script, space, h=1e-6):
    loss_fn, policy_class, oracle, coefs = LOSSES[script]
    policy, sizes, batch = policy_and_batch(policy_class, space, 0, torch.float64)
    # Every case of the clipped surrogate: ratio below, inside, above; advantage of either sign.
    steps = [(s["ratio"], s["advantages"]) for s in terms(policy, sizes, batch)]
    assert len({(r > 1 - CLIP, r > 1 + CLIP, a > 0) for r, a in steps}) == 6
    loss, _ = loss_fn(policy, batch, *coefs)
    gradient = parameters_to_vector(torch.autograd.grad(loss, list(policy.parameters())))
    theta = parameters_to_vector(policy.parameters()).detach()

    def loss_at(parameters):
        vector_to_parameters(parameters, policy.parameters())
        return oracle(policy, sizes, batch)[0]

    shifts = h * torch.eye(len(theta)).double()  # one row per parameter
    expected = [(loss_at(theta + shift) - loss_at(theta - shift)) / (2 * h) for shift in shifts]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


# ---- GAE ----


def gae_oracle(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """One environment's lists: the sum of discounted TD errors up to the episode's end."""
    columns = zip(rewards, values, next_values, terminated)
    deltas = [r + gamma * nv * (not end) - v for r, v, nv, end in columns]
    advantages = []
    for t in range(len(deltas)):
        stop = done.index(True, t) + 1 if True in done[t:] else len(done)
        advantages.append(to_go(deltas[t:stop], gamma * gae_lambda)[0])
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_gae_matches_the_loops(gae_lambda, gamma):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        T, N = rng.integers(1, 10), rng.integers(1, 4)
        rewards, values, next_values = torch.tensor(rng.normal(size=(3, T, N)))  # [T, N] each
        done = torch.tensor(rng.random((T, N)) < 0.35)
        terminated = done & torch.tensor(rng.random((T, N)) < 0.5)
        columns = (rewards, values, next_values, terminated, done)
        advantages, returns = ppo.compute_gae(*columns, gamma, gae_lambda)
        per_env = zip(*(column.T.tolist() for column in columns))
        expected = [gae_oracle(*lists, gamma, gae_lambda) for lists in per_env]
        expected = torch.tensor(expected, dtype=torch.float64).T
        torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(returns, expected + values, rtol=1e-9, atol=1e-12)


# Rewards 1 2 3, V = 4 2 6, V of what the last step led to 8, gamma = 1/2.
GAE_CASES = {  # terminated, done, lambda, advantages
    # the one-step TD errors 1+2/2-4, 2+6/2-2 and 3-6 or, not being terminal, 3+8/2-6
    "lambda 0, terminated": ([0, 0, 1], [0, 0, 1], 0.0, [-2, 3, -3]),
    "lambda 0, truncated": ([0, 0, 0], [0, 0, 1], 0.0, [-2, 3, 1]),
    # discounted return minus V: 1+2/2+3/4-4, 2+3/2-2, 3-6; truncated adds 8/8, 8/4, 8/2
    "lambda 1, terminated": ([0, 0, 1], [0, 0, 1], 1.0, [-1.25, 1.5, -3]),
    "lambda 1, truncated": ([0, 0, 0], [0, 0, 1], 1.0, [-0.25, 3.5, 1]),
    "lambda 1, cut off by the rollout's end": ([0, 0, 0], [0, 0, 0], 1.0, [-0.25, 3.5, 1]),
    # an end in the middle lets nothing pass back: 1+2/2-4 if truncated, 1-4 if terminated
    "lambda 1, truncated at once": ([0, 0, 1], [1, 0, 1], 1.0, [-2, 1.5, -3]),
    "lambda 1, terminated at once": ([1, 0, 1], [1, 0, 1], 1.0, [-3, 1.5, -3]),
}


@pytest.mark.parametrize("case", GAE_CASES)
def test_gae_by_hand(case):
    terminated, done, gae_lambda, expected = GAE_CASES[case]
    columns = torch.tensor([[1.0, 2, 3], [4, 2, 6], [2, 6, 8]])[..., None]  # [3, 1] each
    flags = torch.tensor([terminated, done], dtype=torch.bool)[..., None]
    advantages, returns = ppo.compute_gae(*columns, *flags, 0.5, gae_lambda)
    assert advantages[:, 0].tolist() == expected  # exact in float32: all are binary fractions
    assert returns[:, 0].tolist() == [a + v for a, v in zip(expected, [4, 2, 6])]
