"""Independent oracle: the formulas of DeepSeekMath section 4.1 and of GAE as loops over plain
Python floats, written from the equations alone, against what the four scripts compute.
"""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import grpo_outcome
import grpo_process
import grpo_rtg
import ppo

ACTION_SPACES = [pytest.param(Discrete(3), id="discrete"), pytest.param(Box(-2, 2, (2,)), id="box")]
CLIP, KL_COEF, ENT_COEF, VF_COEF = 0.2, 0.3, 0.05, 0.7


# ---- advantages: a group is a list of episodes, an episode a list of rewards
# -----------------------------------------
def mean(values):
    return sum(values) / len(values)


def to_go(episode, gamma):
    return [
        sum(gamma ** (j - t) * episode[j] for j in range(t, len(episode)))
        for t in range(len(episode))
    ]


def normalize(values, baselines, norm_std):
    """(value - baseline) / sample std; exactly 0 without spread, which is judged by the size of the
    values.
    """
    centred = [value - baseline for value, baseline in zip(values, baselines)]
    std = math.sqrt(sum(c * c for c in centred) / (len(centred) - 1))
    if std <= 1e-6 * max(abs(value) for value in values):
        return [0.0 for _ in centred]
    return [c / std if norm_std else c for c in centred]


def normalize_steps(group, baselines, norm_std):
    """The same over all the steps of a group, given and returned episode by episode."""
    values, baselines = (
        [x for episode in nested for x in episode] for nested in (group, baselines)
    )
    scores = iter(normalize(values, baselines, norm_std))
    return [[next(scores) for _ in episode] for episode in group]


def pooled_mean(group):
    pooled = mean([x for episode in group for x in episode])
    return [[pooled for _ in episode] for episode in group]


def outcome_oracle(group, gamma, norm_std):
    returns = [to_go(episode, gamma)[0] for episode in group]
    scores = normalize(returns, [mean(returns) for _ in group], norm_std)
    return [[score for _ in episode] for score, episode in zip(scores, group)]


def process_oracle(group, gamma, norm_std):
    return [
        to_go(episode, gamma) for episode in normalize_steps(group, pooled_mean(group), norm_std)
    ]


def rtg_oracle(group, gamma, norm_std, baseline):
    returns = [to_go(episode, gamma) for episode in group]
    baselines = pooled_mean(returns)
    if baseline == "timestep":  # only the members still alive at t
        baselines = [
            [mean([g[t] for g in returns if len(g) > t]) for t in range(len(ep))] for ep in group
        ]
    return normalize_steps(returns, baselines, norm_std)


VARIANTS = {
    "outcome": (grpo_outcome, outcome_oracle, {}),
    "process": (grpo_process, process_oracle, {}),
    "rtg-group": (grpo_rtg, rtg_oracle, {"baseline": "group"}),
    "rtg-timestep": (grpo_rtg, rtg_oracle, {"baseline": "timestep"}),
}


def pad(groups, padding=99.0, dtype=torch.float32):
    """Lists of episodes -> rewards [K, G, T], mask [K, G, T]; the padding is no reward and must
    never count.
    """
    T = max(len(episode) for group in groups for episode in group)
    rewards = [[episode + [padding] * (T - len(episode)) for episode in group] for group in groups]
    mask = [[[t < len(episode) for t in range(T)] for episode in group] for group in groups]
    return torch.tensor(rewards, dtype=dtype), torch.tensor(mask)


def random_groups(seed):
    """Dense, sparse or CartPole-like rewards (float32 values); no group has all its members equally
    long.
    """
    rng = np.random.default_rng(seed)
    K, G, T = rng.integers(1, 4), rng.integers(2, 6), rng.integers(2, 10)
    draw = [lambda n: rng.normal(0.5, 2, n), lambda n: rng.integers(0, 2, n), np.ones][seed % 3]
    lengths = [[T, rng.integers(1, T), *rng.integers(1, T + 1, G - 2)] for _ in range(K)]
    return [[draw(n).astype(np.float32).tolist() for n in group] for group in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("norm_std", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(21))
def test_advantages_match_the_loops(variant, norm_std, gamma, seed):
    module, oracle, kwargs = VARIANTS[variant]
    groups = random_groups(seed)
    expected, _ = pad(
        [oracle(group, gamma, norm_std, **kwargs) for group in groups], 0.0, torch.float64
    )
    advantages = module.compute_advantages(*pad(groups), gamma, norm_std, **kwargs)
    # dtype and the zero padding too
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_spread_gives_zero_and_a_small_spread_counts(variant):
    module, _, kwargs = VARIANTS[variant]
    rewards, mask = torch.full((1, 3, 4), 0.1), torch.ones(1, 3, 4, dtype=torch.bool)
    # one float32 step up: rounding, not spread
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(1.0))
    assert (module.compute_advantages(rewards, mask, 0.0, True, **kwargs) == 0).all()
    rewards[0, 2, 0] += 1e-4  # a real difference counts in full
    assert module.compute_advantages(rewards, mask, 0.0, True, **kwargs).abs().max() > 1
    # an epsilon added to the standard deviation would show when the rewards are tiny
    rewards, mask = pad(random_groups(0), dtype=torch.float64)
    tiny, full = (
        module.compute_advantages(c * rewards, mask, 0.9, True, **kwargs) for c in (1e-7, 1.0)
    )
    torch.testing.assert_close(tiny, full, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "module", [grpo_outcome, grpo_process, grpo_rtg], ids=lambda module: module.__name__
)
@pytest.mark.parametrize("loss_agg", ["trajectory", "step"])
@pytest.mark.parametrize("seed", range(20))
def test_step_weights(module, loss_agg, seed):
    groups = random_groups(seed)
    _, mask = pad(groups)
    lengths = [[len(episode) for episode in group] for group in groups]
    S, episodes = sum(map(sum, lengths)), len(groups) * len(groups[0])
    weights = module.step_weights(mask, loss_agg)
    assert weights.shape == mask.shape
    for (
        k,
        g,
        t,
    ) in mask.nonzero().tolist():  # weight / S is what the step's x counts for in the aggregate
        share = 1 / (episodes * lengths[k][g]) if loss_agg == "trajectory" else 1 / S
        assert float(weights[k, g, t]) / S == pytest.approx(share, rel=1e-6)


# ---- losses: values in float32 as in training; gradients in float64, by finite differences of the
# loops --------------
def rows(policy, obs):
    """A row for each step: logits, or means and log standard deviations."""
    log_std = [] if policy.discrete else policy.log_std.tolist()
    return [row + log_std for row in policy(obs).tolist()]


def log_prob_and_entropy(output, action):
    """output: the policy's row for one step, logits or [mean, log_std]; action: an int or a list of
    floats.
    """
    if isinstance(action, int):
        log_z = math.log(sum(math.exp(logit) for logit in output))
        return output[action] - log_z, -sum(
            math.exp(logit - log_z) * (logit - log_z) for logit in output
        )
    dims = list(zip(action, output[: len(action)], output[len(action) :], strict=True))
    log_prob = sum(
        -0.5 * ((a - m) / math.exp(s)) ** 2 - s - 0.5 * math.log(2 * math.pi) for a, m, s in dims
    )
    return log_prob, sum(s + 0.5 * math.log(2 * math.pi * math.e) for _, _, s in dims)


def evaluate_steps(policy, batch):
    """The batch as one dict of plain Python numbers per step, with the per-step terms of Eq. 3."""
    steps = [dict(zip(batch, row)) for row in zip(*(column.tolist() for column in batch.values()))]
    for step, output in zip(steps, rows(policy, batch["obs"])):
        log_prob, step["entropy"] = log_prob_and_entropy(output, step["actions"])
        step["ratio"] = ratio = math.exp(log_prob - step["log_probs"])
        step["surrogate"] = min(
            ratio * step["advantages"], min(max(ratio, 1 - CLIP), 1 + CLIP) * step["advantages"]
        )
        log_ref_ratio = step["ref_log_probs"] - log_prob
        step["kl"] = math.exp(log_ref_ratio) - log_ref_ratio - 1
    return steps


def grpo_loss_oracle(policy, batch):
    steps = evaluate_steps(policy, batch)
    surrogate, kl, entropy = (
        mean([s["weights"] * s[x] for s in steps]) for x in ("surrogate", "kl", "entropy")
    )
    metrics = {"policy_loss": -surrogate, "kl": kl, "entropy": entropy}
    metrics["approx_kl"] = mean([s["ratio"] - 1 - math.log(s["ratio"]) for s in steps])
    metrics["clipfrac"] = mean([abs(s["ratio"] - 1) > CLIP for s in steps])
    return -(surrogate - KL_COEF * kl + ENT_COEF * entropy), metrics


def ppo_loss_oracle(policy, batch):
    pairs = zip(evaluate_steps(policy, batch), policy.value(batch["obs"]).tolist(), strict=True)
    value_loss = [(VF_COEF * 0.5 * (value - s["returns"]) ** 2, s) for s, value in pairs]
    return mean([v - s["surrogate"] - ENT_COEF * s["entropy"] for v, s in value_loss]), {}


def policy_and_batch(policy_class, action_space, dtype, seed, B=24):
    """A policy away from its initialisation, which may leave outputs near zero, and steps with
    ratios away from 1.
    """
    torch.manual_seed(seed)
    policy = policy_class(Box(-5, 5, (3,)), action_space, hidden_size=4).to(dtype)
    theta = parameters_to_vector(policy.parameters())
    vector_to_parameters(0.5 * torch.randn_like(theta), policy.parameters())
    obs = torch.randn(B, 3, dtype=dtype)
    actions = (
        torch.randint(3, (B,))
        if isinstance(action_space, Discrete)
        else torch.randn(B, 2, dtype=dtype)
    )
    log_probs = [log_prob_and_entropy(o, a)[0] for o, a in zip(rows(policy, obs), actions.tolist())]
    noise = 0.5 * torch.randn(2, B, dtype=dtype)
    log_probs, ref_log_probs = torch.tensor(log_probs, dtype=dtype) + noise
    batch = {"obs": obs, "actions": actions, "log_probs": log_probs, "ref_log_probs": ref_log_probs}
    batch |= {name: torch.randn(B, dtype=dtype) for name in ("advantages", "returns")}
    return policy, batch | {"weights": 0.2 + torch.rand(B, dtype=dtype)}


LOSSES = {
    module.__name__: (module.grpo_loss, module.Policy, grpo_loss_oracle, (CLIP, KL_COEF, ENT_COEF))
    for module in (grpo_outcome, grpo_process, grpo_rtg)
}
LOSSES["ppo"] = (ppo.ppo_loss, ppo.ActorCritic, ppo_loss_oracle, (CLIP, ENT_COEF, VF_COEF))


@pytest.mark.parametrize("script", LOSSES)
@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_metrics(script, action_space, seed):
    loss_fn, policy_class, oracle, coefs = LOSSES[script]
    policy, batch = policy_and_batch(policy_class, action_space, torch.float32, seed)
    loss, metrics = loss_fn(policy, batch, *coefs)
    expected_loss, expected_metrics = oracle(policy, batch)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
    for name, expected in expected_metrics.items():
        assert torch.as_tensor(metrics[name]).item() == pytest.approx(
            expected, rel=1e-5, abs=1e-5
        ), name


@pytest.mark.parametrize("script", LOSSES)
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_loss_gradient(script, action_space, h=1e-6):
    loss_fn, policy_class, oracle, coefs = LOSSES[script]
    policy, batch = policy_and_batch(policy_class, action_space, torch.float64, seed=0)
    # the batch must hold every case of the clipped surrogate: ratio below, inside, above; advantage
    # of either sign
    steps = evaluate_steps(policy, batch)
    assert (
        len({(s["ratio"] > 1 - CLIP, s["ratio"] > 1 + CLIP, s["advantages"] > 0) for s in steps})
        == 6
    )
    loss, _ = loss_fn(policy, batch, *coefs)
    gradient = parameters_to_vector(torch.autograd.grad(loss, list(policy.parameters())))
    theta = parameters_to_vector(policy.parameters()).detach()

    def loss_at(parameters):
        vector_to_parameters(parameters, policy.parameters())
        return oracle(policy, batch)[0]

    shifts = h * torch.eye(len(theta), dtype=theta.dtype)  # one row per parameter
    expected = [(loss_at(theta + shift) - loss_at(theta - shift)) / (2 * h) for shift in shifts]
    torch.testing.assert_close(
        gradient, torch.tensor(expected, dtype=theta.dtype), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize(
    "module", [grpo_outcome, grpo_process, grpo_rtg], ids=lambda module: module.__name__
)
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_kl_gradient_with_respect_to_the_policy_output(module, action_space):
    policy, batch = policy_and_batch(module.Policy, action_space, torch.float64, seed=0)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    outputs = policy(batch["obs"]).detach().requires_grad_()
    policy.register_forward_hook(lambda *_: outputs)  # the output itself becomes the variable
    loss, _ = module.grpo_loss(policy, batch, CLIP, 1.0, 0.0)
    log_std = [] if policy.discrete else [policy.log_std]
    gradient, *log_std_gradient = torch.autograd.grad(loss, [outputs, *log_std])
    columns = (batch[name].tolist() for name in ("actions", "ref_log_probs", "weights"))
    through_log_std = [0.0, 0.0]  # a parameter of all steps: their sum
    for row, output, action, ref_log_prob, weight in zip(
        gradient.tolist(), rows(policy, batch["obs"]), *columns
    ):
        # d KL / d log pi_theta
        slope = 1 - math.exp(ref_log_prob - log_prob_and_entropy(output, action)[0])
        if isinstance(action, int):  # d log pi(a) / d logit_j = 1[j = a] - pi(j)
            score = [(j == action) - math.exp(log_prob_and_entropy(output, j)[0]) for j in range(3)]
        else:  # d log pi(a) / d mean = z / std, / d log_std = z^2 - 1, with z = (a - mean) / std
            z = [(a - m) / math.exp(s) for a, m, s in zip(action, output[:2], output[2:])]
            score = [zi / math.exp(s) for zi, s in zip(z, output[2:])]
            through_log_std = [
                sum_ + weight * slope * (zi * zi - 1) for sum_, zi in zip(through_log_std, z)
            ]
        assert row == pytest.approx(
            [weight * slope * s / len(gradient) for s in score], rel=1e-9, abs=1e-12
        )
    for given in log_std_gradient:
        assert given.tolist() == pytest.approx(
            [x / len(gradient) for x in through_log_std], rel=1e-9, abs=1e-12
        )


# ---- GAE
# --------------------------------------------------------------------------------------------------
def gae_oracle(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """One env's lists: the sum of discounted TD errors up to the episode's end, written out instead
    of recursed.
    """
    deltas = [
        r + gamma * nv * (not end) - v
        for r, v, nv, end in zip(rewards, values, next_values, terminated)
    ]
    advantages = []
    for t in range(len(deltas)):
        stop = done.index(True, t) + 1 if True in done[t:] else len(done)
        advantages.append(to_go(deltas[t:stop], gamma * gae_lambda)[0])
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_gae_matches_the_loops(gae_lambda, gamma, seed):
    rng = np.random.default_rng(seed)
    T, N = rng.integers(1, 10), rng.integers(1, 4)
    rewards, values, next_values = torch.tensor(rng.normal(size=(3, T, N)))  # [T, N] each
    done = torch.tensor(rng.random((T, N)) < 0.35)
    columns = (rewards, values, next_values, done & torch.tensor(rng.random((T, N)) < 0.5), done)
    advantages, returns = ppo.compute_gae(*columns, gamma, gae_lambda)
    per_env = [
        gae_oracle(*(c[:, n].tolist() for c in columns), gamma, gae_lambda) for n in range(N)
    ]
    expected = torch.tensor(per_env, dtype=torch.float64).T
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
    # [3, 1]
    floats = [
        torch.tensor(x, dtype=torch.float32)[:, None] for x in ([1, 2, 3], [4, 2, 6], [2, 6, 8])
    ]
    flags = [torch.tensor(x, dtype=torch.bool)[:, None] for x in (terminated, done)]
    advantages, returns = ppo.compute_gae(*floats, *flags, 0.5, gae_lambda)
    assert advantages[:, 0].tolist() == expected  # exact in float32: all are binary fractions
    assert returns[:, 0].tolist() == [a + v for a, v in zip(expected, [4, 2, 6])]
