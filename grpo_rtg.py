"""GRPO with returns-to-go, by default with a linear critic fitted in closed form.

    python grpo_rtg.py --env-id CartPole-v1
    python grpo_rtg.py --evaluate runs/<run>/model.pt --render

Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, section 4.1) samples a group of
G outputs to a question and judges each by the others. Here a question is a start state with the
luck that follows, fixed by env.reset(seed=s), and an output is an episode. The objective is Eq. 3
with the KL term of Eq. 4, averaged over K groups:

    1/G Σ_i 1/|o_i| Σ_t { min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - β D_KL },    ρ = π_θ(a|s) / π_old(a|s)
    D_KL = π_ref/π_θ - log(π_ref/π_θ) - 1

This file compares returns-to-go with a baseline b (Kaggle discussion 573162, sb3-contrib #301):

    R_{i,t} = Σ_{j≥t} γ^(j-t) r_{i,j},    Â_{i,t} = (R_{i,t} - b_{i,t}) / std(R - b)

--baseline group: b is the mean over the group's steps, as proposed there. timestep: the mean over
the members alive at t. regression: no mean of the group but a value estimate, a least-squares fit
of R to state and time over this and earlier iterations' groups. With it GAE (arXiv:1506.02438)
takes the place of R - b. After its end an episode has b = 0; where a time limit cut it, it has its
last b, for the rewards that were cut off. With these in R, too, both are equal at λ = 1:

    Σ_{j≥t} (γλ)^(j-t) (r_{i,j} + γ b_{i,j+1} - b_{i,j})

    paper   here                      paper   here
    G       --group-size              π_old   old_log_probs
    o_i     an episode (member)       π_ref   reference, renewed every M iterations
    |o_i|   its number of steps       ε, β    --clip-coef, --kl-coef
    ρ, Â    ratio, advantages         M, μ    --ref-update-interval, --update-epochs

Unlike in the paper, rewards are the environment's: no reward model is trained (line 12). Further
defaults: no KL term (β = 0: no policy is pretrained), a mean over all steps (--loss-agg trajectory:
over episodes, as in Eq. 3), several passes (μ) over minibatches, early stopping (--target-kl),
gradient clipping, a falling learning rate, a discount. A step of Algorithm 1 is an iteration here.
"""

import inspect
import io
import json
import os
import shlex
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK = int(os.environ.get("RANK", 0))  # this process's number under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # and how many there are


@dataclass
class Algorithm:
    num_groups: int = 4  # K: groups per iteration, each from its own start state
    group_size: int = 4  # G: episodes per group
    gamma: float = 0.99  # γ: discount per step
    # b, subtracted from returns-to-go: mean of the group, of its members alive at t, or a fit
    baseline: Literal["group", "timestep", "regression"] = "regression"
    gae_lambda: float = 0.98  # λ of GAE, with --baseline regression
    decay: float = 0.67  # weight of earlier iterations in --baseline regression (0: none)
    norm_std: bool = True  # divide by the standard deviation (off: as Dr. GRPO, arXiv:2503.20783)
    seed_groups: bool = True  # start a group in one state (off: a seed for each member)
    update_epochs: int = 8  # μ: passes over an iteration's steps
    minibatch_size: int = 256  # about how many steps a gradient step sees
    learning_rate: float = 3e-3  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall linearly to 0
    clip_coef: float = 0.2  # ε: the ratio is clipped to [1-ε, 1+ε]
    kl_coef: float = 0.0  # β: weight of the KL penalty towards π_ref
    ref_update_interval: int = 1  # M: iterations from one π_ref ← π_θ to the next (0: fixed)
    loss_agg: Literal["trajectory", "step"] = "step"  # mean over episodes (Eq. 3) or steps (DAPO)
    ent_coef: float = 0.0  # weight of an entropy bonus, in nats
    max_grad_norm: float = 0.5  # L2 norm to which the gradient is clipped (0: it is not)
    target_kl: float = 0.05  # end an update once KL(π_old, π_θ) exceeds this, in nats (0: never)
    hidden_size: int = 64  # units in each of the two hidden layers
    log_std_init: float = 0.0  # log of the Gaussian's first standard deviation (Box actions)
    norm_obs: bool = False  # normalize observations by statistics kept in the model


@dataclass
class Environment:
    env_id: str = "CartPole-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    env_kwargs: str = "{}"  # arguments of the environment in JSON, as '{"is_slippery": false}'
    max_episode_steps: int = 0  # cut episodes here (0: the environment's limit, 1000 if none)
    total_timesteps: int = 200_000  # environment steps; an iteration that exceeds them is dropped


@dataclass
class Program:
    seed: int = 1  # fixes weights, start states and sampling; with --evaluate, the episodes
    cuda: bool = False  # train on a GPU if there is one
    num_threads: int = 1  # torch's CPU threads
    eval_interval: int = 0  # environment steps between evaluations (0: only after training)
    eval_episodes: int = 100  # episodes of an evaluation (with --render: 5)
    greedy: bool = True  # evaluate the likeliest actions (off: sampled ones, as in training)
    render: bool = False  # show the episodes of evaluations in a window
    capture_video: bool = False  # record episodes 0, 1, 8, 27, ... of an evaluation
    track: bool = False  # log to Weights & Biases as well (pip install wandb)
    checkpoint_interval: float = 10.0  # seconds between checkpoints
    resume: str | None = None  # go on from this checkpoint.pt; options not given are its own
    evaluate: str | None = None  # play this model.pt or checkpoint.pt instead of training


@dataclass
class Args(Program, Environment, Algorithm):
    """All options; Args() is the default run."""


def compute_advantages(
    rewards: Tensor,
    mask: Tensor,
    gamma: float,
    norm_std: bool = True,
    *,
    baseline: str,
    values: Tensor | None = None,  # of "regression"
    gae_lambda: float = 0.98,
) -> Tensor:
    """Advantages [K, G, T] of every step, 0 where mask is False.

    rewards and mask are [K, G, T]; values [K, G, T + 1] are the b of "regression". A group whose
    R - b have no spread beyond the rounding of R gives exactly 0.
    """
    rewards = rewards.double().where(mask, 0)
    returns = discounted_sums(rewards, gamma)  # R
    num_steps = mask.sum(dim=(1, 2), keepdim=True)  # of the group, [K, 1, 1]
    if baseline == "group":
        advantages = returns - returns.sum(dim=(1, 2), keepdim=True) / num_steps
    elif baseline == "timestep":
        alive = mask.sum(dim=1, keepdim=True)  # members at t, [K, 1, T]
        advantages = returns - returns.sum(dim=1, keepdim=True) / alive.clamp(min=1)
    elif baseline == "regression":
        deltas = rewards + gamma * values[..., 1:] - values[..., :-1]
        advantages = discounted_sums(deltas.where(mask, 0), gamma * gae_lambda)
    else:
        raise ValueError(f"There is no baseline {baseline!r}.")
    advantages = advantages.where(mask, 0)
    square_sum = advantages.square().sum(dim=(1, 2), keepdim=True)  # about 0, whatever their mean
    std = (square_sum / (num_steps - 1).clamp(min=1)).sqrt()
    tied = std <= 1e-6 * returns.abs().amax(dim=(1, 2), keepdim=True)
    if norm_std:
        advantages = advantages / std
    return advantages.where(~tied, 0)


def discounted_sums(x: Tensor, gamma: float) -> Tensor:
    """Σ_{j≥t} γ^(j-t) x_j along the last dimension."""
    sums = x.clone()
    for t in reversed(range(x.shape[-1] - 1)):
        sums[..., t] += gamma * sums[..., t + 1]
    return sums


def step_weights(mask: Tensor, loss_agg: str) -> Tensor:
    """Weights w [K, G, T] such that (w x).mean() over all S steps is the mean that loss_agg names.

    "trajectory": 1/(K G) Σ_i 1/|o_i| Σ_t x (Eq. 3). "step": 1/S Σ x (DAPO, over all K groups).
    """
    if loss_agg == "step":
        return mask.double()
    lengths = mask.sum(dim=-1, keepdim=True).double()  # |o_i|, [K, G, 1]
    return mask * lengths.sum() / (lengths.numel() * lengths)  # S / (K G |o_i|)


def grpo_loss(policy, batch: dict, clip_coef: float, kl_coef: float, ent_coef: float):
    """Minus Eq. 3 and an entropy bonus on a flat batch of B steps, and the metrics that are logged.

    batch: obs [B, D], actions [B, A], and [B] each: old_log_probs, ref_log_probs, advantages,
    weights (by step_weights).
    """
    distribution = policy(batch["obs"])
    log_probs = distribution.log_prob(batch["actions"])
    advantages = batch["advantages"]
    weights = batch["weights"]

    # Until an iteration's first gradient step ρ is 1: nothing is clipped, the objective is the mean
    # of Â, and its gradient the policy gradient. Log-ratios are bounded, because exp overflows.
    log_ratio = (log_probs - batch["old_log_probs"]).clamp(max=20)  # log π_θ/π_old
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantages, clipped_ratio * advantages)
    policy_loss = -(weights * surrogate).mean()  # Eq. 3: see step_weights

    ref_log_ratio = (batch["ref_log_probs"] - log_probs).clamp(max=20)  # log π_ref/π_θ
    kl = (weights * (ref_log_ratio.exp() - ref_log_ratio - 1)).mean()  # Eq. 4
    entropy = (weights * distribution.entropy()).mean()
    loss = policy_loss
    if kl_coef > 0:  # a term that weighs nothing needs no gradient
        loss = loss + kl_coef * kl
    if ent_coef > 0:
        loss = loss - ent_coef * entropy
    metrics = {
        "losses/policy_loss": policy_loss.detach(),
        "losses/kl": kl.detach(),
        "losses/entropy": entropy.detach(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean().detach(),  # KL(π_old, π_θ) of a step
        "losses/clipfrac": (ratio != clipped_ratio).float().mean(),
    }
    return loss, metrics


class Policy(nn.Module):
    """Observations [B, D] to a distribution over actions [B, A].

    Box: a Gaussian whose standard deviation is the same in every state. Discrete, MultiDiscrete
    and MultiBinary: A choices, each with a categorical of its own.
    """

    def __init__(self, obs_space: spaces.Box, action_space: spaces.Space, args: Args):
        super().__init__()
        self.continuous = isinstance(action_space, spaces.Box)
        if self.continuous:
            num_outputs = int(np.prod(action_space.shape))
            self.log_std = nn.Parameter(args.log_std_init * torch.ones(num_outputs))
        else:
            sizes = torch.tensor(num_options(action_space))  # options of each choice, [A]
            missing = torch.arange(sizes.max()) >= sizes[:, None]  # [A, C], C the most options
            padding = torch.where(missing, -1e9, 0.0)  # added to logits: never chosen
            self.register_buffer("padding", padding, persistent=False)
            num_outputs = missing.numel()
        self.net = mlp(obs_space.shape[0], args.hidden_size, num_outputs, output_gain=0.01)
        self.norm_obs = args.norm_obs
        self.obs_stats = RunningMeanVar(obs_space.shape[0])

    def forward(self, obs: Tensor) -> Distribution:
        """π_θ(·|s) for obs [B, D]."""
        if self.norm_obs:
            obs = self.obs_stats.normalize(obs)
        outputs = self.net(obs.float())
        if self.continuous:
            per_action = Normal(outputs, self.log_std.exp(), validate_args=False)
        else:
            logits = outputs.view(-1, *self.padding.shape) + self.padding  # [B, A, C]
            per_action = Categorical(logits=logits, validate_args=False)
        return Independent(per_action, 1, validate_args=False)

    @torch.no_grad()
    def log_probs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """log π_θ(a|s) [S] of a rollout's steps, in slices that bound the memory."""
        slices = zip(obs.split(2048), actions.split(2048))
        return torch.cat([self(some_obs).log_prob(taken) for some_obs, taken in slices])

    @torch.inference_mode()
    def act(self, obs: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Actions [B, A] for observations [B, D], sampled with rng; without, the likeliest.

        The noise is NumPy's, so that a GPU samples as the CPU does.
        """
        obs = torch.from_numpy(obs).to(next(self.parameters()).device)
        per_action = self(obs).base_dist
        if self.continuous:
            actions = per_action.mean.cpu().numpy()
            if rng is not None:
                noise = rng.standard_normal(actions.shape, np.float32)
                actions = actions + per_action.stddev.cpu().numpy() * noise
            return actions
        logits = per_action.logits.cpu().numpy()
        if rng is not None:  # the largest of logits plus Gumbel noise samples their softmax
            logits = logits + rng.gumbel(size=logits.shape)
        return logits.argmax(axis=-1)


def play(envs: list[gym.Env], policy: Policy, seeds, rng: np.random.Generator | None = None):
    """Play an episode in each environment, from reset(seed=seeds[i]) to its end.

    Yields at each time step, for the B episodes that still run, their numbers [B], observations
    [B, D], actions [B, A], rewards [B], terminated [B] and truncated [B]. rng: see Policy.act.
    """
    members = np.arange(len(seeds))
    next_obs = [env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds)]
    while len(members) > 0:
        obs = stack(next_obs)
        actions = policy.act(obs, rng)
        env_actions = to_env(actions, envs[0].action_space)
        results = [envs[i].step(action) for i, action in zip(members, env_actions)]
        next_obs, rewards, terminated, truncated, _ = zip(*results)
        rewards = np.array(rewards, np.float64).reshape(len(members))  # some have shape (1,)
        terminated = np.array(terminated, bool)
        truncated = np.array(truncated, bool)
        yield members, obs, actions, rewards, terminated, truncated
        goes_on = ~(terminated | truncated)
        members = members[goes_on]
        next_obs = [o for o, on in zip(next_obs, goes_on) if on]


class Episodes(NamedTuple):
    """One episode of each of K·G environments: S steps in all, at most T in one episode."""

    obs: Tensor  # [S, D], by episode, then by time: the order of rewards[mask]
    actions: Tensor  # [S, A], as the policy sampled them
    rewards: Tensor  # [K, G, T] float64, 0 where there is no step
    mask: Tensor  # [K, G, T] bool, True where there is a step
    truncated: Tensor  # [K, G] bool, True where a time limit cut the episode


def collect_groups(envs, policy: Policy, num_groups: int, rng, seed_groups=True) -> Episodes:
    """Sample K groups of G episodes; the members of a group start from one reset seed.

    With seed_groups False each has its own. UserError if a group's starts differ, or for NaN.
    """
    group_size = len(envs) // num_groups
    if seed_groups:  # line 5: K start states
        seeds = rng.integers(2**31, size=num_groups).repeat(group_size)
    else:
        seeds = rng.integers(2**31, size=len(envs))
    time_steps = list(play(envs, policy, seeds, rng))  # lines 7 and 8
    columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*time_steps)]
    order = columns[0].argsort(stable=True)  # of members: by episode, and within one by time
    members, obs, actions, rewards, terminated, truncated = (x[order] for x in columns)  # [S, …]
    if not (obs.isfinite().all() and rewards.isfinite().all()):
        raise UserError(f"{envs[0]} gives numbers that are not finite.")

    lengths = members.bincount()  # [K·G]
    ends = lengths.cumsum(dim=0)  # where the next episode begins
    first_obs = obs[ends - lengths].view(num_groups, group_size, -1)
    if seed_groups and (first_obs != first_obs[:, :1]).any():
        why = "ignores reset(seed), or its constructor draws at random"
        raise UserError(f"{envs[0]} {why}: fix that, or --no-seed-groups.")
    mask = torch.arange(lengths.max()) < lengths.view(num_groups, group_size, 1)
    return Episodes(
        obs=obs,
        actions=actions,
        rewards=torch.zeros(mask.shape).double().masked_scatter(mask, rewards),
        mask=mask,
        truncated=(truncated & ~terminated)[ends - 1].view(num_groups, group_size),
    )


def make_batch(episodes: Episodes, advantages: Tensor, policy, reference, args: Args) -> dict:
    """The S steps of K groups as grpo_loss takes them, on the policy's device."""
    device = next(policy.parameters()).device
    obs = episodes.obs.to(device)
    actions = episodes.actions.to(device)
    weights = step_weights(episodes.mask, args.loss_agg)
    old_log_probs = policy.log_probs(obs, actions)  # line 6: until update, policy is π_old
    ref_log_probs = old_log_probs
    if args.ref_update_interval != 1:  # else π_ref is π_old
        ref_log_probs = reference.log_probs(obs, actions)
    return {
        "obs": obs,
        "actions": actions,
        "advantages": advantages[episodes.mask].float().to(device),
        "weights": weights[episodes.mask].float().to(device),
        "old_log_probs": old_log_probs,
        "ref_log_probs": ref_log_probs,
    }


def update(policy, optimizer, batch: dict, args: Args, rng) -> dict[str, float]:
    """A gradient step a minibatch, until --target-kl ends them; returns the metrics' means."""
    history = []
    parameters = list(policy.parameters())
    for minibatch in minibatches(batch, args, rng):  # line 10: see minibatches
        loss, metrics = grpo_loss(policy, minibatch, args.clip_coef, args.kl_coef, args.ent_coef)
        optimizer.zero_grad()
        loss.backward()
        approx_kl = metrics["losses/approx_kl"]
        gradients = [parameter.grad for parameter in parameters]
        average_over_processes([*gradients, approx_kl])  # in place: all step, or stop, alike
        grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or torch.inf)
        history.append(metrics | {"losses/grad_norm": grad_norm})
        if args.target_kl > 0 and approx_kl > args.target_kl:  # already far from π_old
            break
        optimizer.step()  # line 11
    means = {name: torch.stack([x[name] for x in history]).mean().item() for name in history[0]}
    return means | {"losses/minibatches": len(history)}


def minibatches(batch: dict, args: Args, rng: np.random.Generator):
    """--update-epochs shuffled passes over all S steps; all processes share --minibatch-size."""
    num_steps = len(batch["obs"])
    num_minibatches = max(1, round(num_steps * WORLD_SIZE / args.minibatch_size))
    num_minibatches = over_processes(num_minibatches, dist.ReduceOp.MIN)  # all take as many
    for _ in range(args.update_epochs):
        order = torch.from_numpy(rng.permutation(num_steps)).to(batch["obs"].device)
        for indices in order.tensor_split(num_minibatches):
            yield {name: x[indices] for name, x in batch.items()}


class ReturnRegression(nn.Module):
    """b(s, t): ridge regression of returns-to-go on random cosines of state and time.

    The linear baseline of Duan et al. 2016, with features of an RBF kernel (Rahimi and Recht 2007)
    and a memory: each fit multiplies the earlier sums by decay. It also sees the steps it judges.
    """

    NUM_FEATURES = 128
    BANDWIDTH = 2.0  # of the kernel, in inputs' standard deviations times √(their number)
    RIDGE = 1e-3  # penalty on the weights, per step

    def __init__(self, obs_size: int, decay: float):
        super().__init__()
        if obs_size > 4096:
            raise UserError(f"Observations of {obs_size:,} numbers need --baseline timestep.")
        num_inputs = obs_size + 1  # with the time
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.randn(num_inputs, self.NUM_FEATURES, generator=generator).double()
        self.frequencies = frequencies / (self.BANDWIDTH * num_inputs**0.5)
        self.phases = 2 * torch.pi * torch.rand(self.NUM_FEATURES, generator=generator).double()
        self.decay = decay
        self.input_stats = RunningMeanVar(num_inputs)
        size = self.NUM_FEATURES + 1  # with the constant
        self.register_buffer("gram", torch.zeros(size, size).double())  # Σ φ φᵀ
        self.register_buffer("moment", torch.zeros(size).double())  # Σ φ R
        self.register_buffer("weights", torch.zeros(size).double())

    def fit(self, episodes: Episodes, gamma: float) -> Tensor:
        """Fit the episodes' returns and give b [K, G, T + 1], as compute_advantages takes it."""
        t = episodes.mask.nonzero()[:, 2:]  # of each step, [S, 1]
        inputs = torch.cat([episodes.obs, t], dim=-1)  # [S, D + 1]
        self.input_stats.update(inputs)  # features in earlier sums stay as they were
        cosines = torch.cos(self.input_stats.normalize(inputs) @ self.frequencies + self.phases)
        features = nn.functional.pad(cosines, (1, 0), value=1.0)  # φ, the constant first

        # The last iteration's fit says what a time limit cut off: its b is a reward at |o_i|.
        mask = nn.functional.pad(episodes.mask, (0, 1))  # [K, G, T + 1]
        tail = self.values(features, episodes).where(~mask, 0)
        rewards = nn.functional.pad(episodes.rewards.where(episodes.mask, 0), (0, 1)) + tail
        returns = discounted_sums(rewards, gamma)[mask]  # [S]

        self.gram = self.decay * self.gram + features.T @ features
        self.moment = self.decay * self.moment + features.T @ returns
        average_over_processes([self.gram, self.moment])
        penalized = self.gram.clone()
        penalized.diagonal()[1:] += self.RIDGE * self.gram[0, 0]  # per step; the constant is free
        self.weights = torch.linalg.solve(penalized, self.moment)
        return self.values(features, episodes)

    def values(self, features: Tensor, episodes: Episodes) -> Tensor:
        """b [K, G, T + 1]: after its end an episode has 0, or its last b if a time limit cut it."""
        mask = nn.functional.pad(episodes.mask, (0, 1))
        values = torch.zeros(mask.shape).double().masked_scatter(mask, features @ self.weights)
        end = episodes.mask.sum(dim=-1, keepdim=True)  # |o_i|
        last = values.gather(-1, end - 1) * episodes.truncated[..., None]
        return values.scatter(-1, end, last)


def train(args: Args) -> dict:
    """Algorithm 1 of the paper, its lines named in the comments; returns Run.finish's summary."""
    check_args(args)
    device = start_device(args.cuda)
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # for environments whose constructor draws from it
    num_groups = args.num_groups // WORLD_SIZE
    envs = [make_env(args) for _ in range(num_groups * args.group_size)]
    obs_space = envs[0].observation_space
    policy = Policy(obs_space, envs[0].action_space, args).to(device)  # line 1: π_θ
    reference = deepcopy(policy)  # π_ref
    optimizer = Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
    parts = {"policy": policy, "reference": reference, "optimizer": optimizer}
    if args.baseline == "regression":
        parts["regression"] = ReturnRegression(obs_space.shape[0], args.decay)
    run = Run(args, parts)  # with --resume it loads the parts from the checkpoint
    progress = run.progress

    while True:  # lines 2 and 4
        seed = [args.seed, RANK, progress.iteration]  # so that a resumed run repeats it
        rng = np.random.default_rng(seed)
        np.random.seed(seed)
        if args.ref_update_interval > 0 and progress.iteration % args.ref_update_interval == 0:
            reference.load_state_dict(policy.state_dict())  # line 3: π_ref ← π_θ

        # Lines 5 to 8: K start states, G episodes from each, and their rewards. π_old (line 6) is
        # π_θ as it is before update, which the log-probabilities in the batch remember.
        episodes = collect_groups(envs, policy, num_groups, rng, args.seed_groups)
        new_steps = over_processes(len(episodes.obs), dist.ReduceOp.SUM)
        if progress.step + new_steps > args.total_timesteps:
            break  # the iteration is dropped

        values = None
        if args.baseline == "regression":
            values = parts["regression"].fit(episodes, args.gamma)
        advantages = compute_advantages(  # line 9
            episodes.rewards,
            episodes.mask,
            args.gamma,
            args.norm_std,
            baseline=args.baseline,
            values=values,
            gae_lambda=args.gae_lambda,
        )
        batch = make_batch(episodes, advantages, policy, reference, args)
        remaining = 1 - progress.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        metrics = update(policy, optimizer, batch, args, rng)  # lines 10 and 11
        if args.norm_obs:
            policy.obs_stats.update(episodes.obs)
        progress.iteration += 1
        progress.step += new_steps
        run.record(episodes, advantages, new_steps, metrics)

    return run.finish(envs)


# --- The program around the algorithm ---

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "numpy==2.4.6",
#   "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "moviepy==2.2.1"]
# ///


class UserError(ValueError):
    """What the user can put right: main prints the sentence and exits with status 2."""


class Adam(torch.optim.Adam):
    """torch's Adam without the decorators that import its compiler: starts a second sooner."""


for name in ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"):
    setattr(Adam, name, torch.no_grad()(inspect.unwrap(getattr(Adam, name))))


def mlp(num_inputs: int, hidden_size: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear output, with orthogonal weights and zero biases."""
    net = nn.Sequential(
        nn.Linear(num_inputs, hidden_size),
        nn.Tanh(),
        nn.Linear(hidden_size, hidden_size),
        nn.Tanh(),
        nn.Linear(hidden_size, num_outputs),
    )
    for layer, gain in zip(net[::2], [2**0.5, 2**0.5, output_gain]):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return net


class RunningMeanVar(nn.Module):
    """Mean and variance of all vectors so far; buffers, so that they are saved."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(()).double())
        self.register_buffer("mean", torch.zeros(size).double())
        self.register_buffer("var", torch.ones(size).double())

    def normalize(self, x: Tensor) -> Tensor:
        """x [B, D] in standard deviations from the mean, at most 10, in float64."""
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)

    def update(self, x: Tensor) -> None:
        """Merge x [S, D] into the statistics (Chan et al. 1979)."""
        for part in x.split(4096):
            part = part.to(self.mean)
            weight = len(part) / (self.count + len(part))
            delta = part.mean(dim=0) - self.mean
            var = part.var(dim=0, correction=0)
            self.var += weight * (var - self.var + (1 - weight) * delta.square())
            self.mean += weight * delta
            self.count += len(part)
        own_mean = self.mean.clone()
        average_over_processes([self.count, self.mean])
        self.var += (own_mean - self.mean).square()  # the processes' means differ, too
        average_over_processes([self.var])


# what gym.make raises for a wrong name or argument, or the environment's constructor
MISTAKES = (gym.error.Error, ImportError, OSError, TypeError, ValueError, KeyError, AssertionError)


def make_env(args: Args, video_dir: Path | None = None, **options) -> gym.Env:
    """An environment with flat observations, bounded actions rescaled to [-1, 1] and an end."""
    try:
        limit = args.max_episode_steps or None
        kwargs = json.loads(args.env_kwargs)
        env = gym.make(args.env_id, limit, disable_env_checker=True, **options, **kwargs)
        if video_dir is not None:
            env = gym.wrappers.RecordVideo(env, str(video_dir))
    except MISTAKES as error:
        what = args.env_id
        if args.env_kwargs != "{}":
            what += f" with --env-kwargs '{args.env_kwargs}'"
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"Cannot make {what}: {why}") from error
    mode = options.get("render_mode")
    if mode is not None and mode not in env.metadata.get("render_modes", []):
        raise UserError(f"{args.env_id} has no render_mode {mode!r} in its metadata.")
    if env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 1000)
    space = env.action_space
    num_options(space)  # UserError for spaces that are not supported
    bounded = isinstance(space, spaces.Box) and space.is_bounded()
    if bounded and space != spaces.Box(-1, 1, space.shape, space.dtype):
        env = gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    try:
        num_inputs = spaces.flatdim(env.observation_space)
    except (NotImplementedError, ValueError) as error:
        raise UserError(
            "Observations cannot be flattened: wrap the environment, as minigrid's FlatObsWrapper "
            f"does (docs/environments.md): {env.observation_space}"
        ) from error
    if env.observation_space.shape != (num_inputs,):
        env = gym.wrappers.FlattenObservation(env)
    return env


def num_options(space: spaces.Space) -> list[int]:
    """How many options each of the A choices of an action has; UserError for other spaces."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.flatten().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f" and (space.low < space.high).all():
        return []  # numbers, no choices
    raise UserError(
        "Actions must be Discrete, MultiDiscrete, MultiBinary or a Box of floats with low < high, "
        f"not {space}: wrap the environment (docs/environments.md)."
    )


def to_env(actions: np.ndarray, space: spaces.Space) -> list:
    """Actions [B, A] as env.step takes them: Box ones clipped, choices counted from start."""
    actions = actions.reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        actions = actions.clip(space.low, space.high)
    else:
        actions = actions + getattr(space, "start", 0)
    return list(actions.astype(space.dtype))


def stack(obs) -> np.ndarray:
    """Observations [B, D]: images stay bytes, all else becomes float32."""
    obs = np.array(obs)
    return obs if obs.dtype == np.uint8 else obs.astype(np.float32)


def start_device(cuda: bool) -> torch.device:
    """The CPU or, with --cuda, a GPU; under torchrun one for each process, and they are joined."""
    if cuda and not torch.cuda.is_available():
        torch_here = f"torch {torch.__version__}"  # says +cpu where that is the reason
        print(f"WARNING: --cuda was asked for, but {torch_here} finds no GPU; USING THE CPU")
        cuda = False
    if cuda:
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            raise UserError("--cuda needs a GPU for each of torchrun's processes on a machine.")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        dist.init_process_group(timeout=timedelta(days=1))  # while the first one evaluates
    print("Device:", torch.cuda.get_device_name() if cuda else "CPU")
    return torch.device("cuda" if cuda else "cpu")


def over_processes(number: int, op: dist.ReduceOp) -> int:
    """The sum or the minimum, as op says, of the number that each of torchrun's processes has."""
    tensor = torch.tensor(number)
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return int(tensor)


def average_over_processes(tensors) -> None:
    """Under torchrun replace tensors, in place, by their mean over the processes."""
    if dist.is_initialized():
        vector = nn.utils.parameters_to_vector(tensors)
        dist.all_reduce(vector)
        nn.utils.vector_to_parameters(vector / WORLD_SIZE, tensors)


def evaluate(policy: Policy, args: Args, seed: int, video_dir: Path | None = None) -> np.ndarray:
    """Play --eval-episodes episodes, number i from reset(seed=seed + i); their returns."""
    np.random.seed(seed % 2**32)
    if args.render:
        envs = [make_env(args, render_mode="human")]
    elif args.capture_video:
        envs = [make_env(args, video_dir, render_mode="rgb_array")]
    else:
        envs = [make_env(args) for _ in range(min(args.eval_episodes, 20))]
    rng = None if args.greedy else np.random.default_rng(seed)
    seeds = range(seed, seed + args.eval_episodes)
    returns = np.zeros(len(seeds))
    bar = tqdm(total=len(seeds), desc="Evaluating", leave=False, delay=1, mininterval=1, miniters=0)
    for first in range(0, len(seeds), len(envs)):
        some_seeds = seeds[first : first + len(envs)]
        for members, _, _, rewards, terminated, truncated in play(envs, policy, some_seeds, rng):
            returns[first + members] += rewards
            bar.update(int((terminated | truncated).sum()))
    bar.close()
    for env in envs:
        env.close()  # which also finishes a video
    kind = "Greedy" if args.greedy else "Sampled"
    mean = f"{returns.mean():.2f} ± {returns.std():.2f}"
    tqdm.write(f"{kind} evaluation, {len(returns)} episodes: return {mean}")
    if args.capture_video:
        tqdm.write(f"Videos: {video_dir}")
    return returns


@dataclass
class Progress:
    """How far a run is; checkpoints keep it beside the networks."""

    iteration: int = 0
    step: int = 0  # environment steps
    seconds: float = 0.0
    recent_returns: list[float] = field(default_factory=list)  # of the last 100 training episodes
    eval_returns: list[float] = field(default_factory=list)  # of the last evaluation
    eval_step: int = 0  # when that was
    best_return: float = -np.inf  # the best mean of an evaluation

    def state_dict(self) -> dict:
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        self.__init__(**state)  # TypeError for other names


class Run:
    """A run's progress, logs and files. Of torchrun's processes only the first writes files."""

    EVAL_SEED = 10**9  # all runs are evaluated from the same states
    go_on = ""  # how to resume the latest run

    def __init__(self, args: Args, parts: dict):
        self.args = args
        self.progress = Progress()
        self.parts = parts | {"progress": self.progress}  # what a checkpoint keeps
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{now}"
        self.dir = Path("runs", name.replace("/", "-").replace(":", "-"))
        if args.resume is not None:
            self.dir = Path(args.resume).parent
            load(args.resume, self.parts)
        self.started = time.perf_counter() - self.progress.seconds
        if RANK == 0:
            if args.render or args.capture_video:  # that it works is better known before training
                env = make_env(args, render_mode="human" if args.render else "rgb_array")
                env.reset()
                env.render()
                env.close()
            if args.capture_video:
                make_env(args, self.dir / "videos", render_mode="rgb_array").close()
            self.open_logs()
            self.save_checkpoint()
            resume = command("--resume", self.dir / "checkpoint.pt", args)
            Run.go_on = f"To go on: {resume}"
            print(f"If it stops: {resume}")
        shown = {"unit": " steps", "unit_scale": True, "mininterval": 1, "disable": RANK > 0}
        self.bar = tqdm(total=args.total_timesteps, initial=self.progress.step, **shown)

    def open_logs(self) -> None:
        """Open TensorBoard's log, and W&B's; a resumed run goes on from its checkpoint."""
        options = asdict(self.args)
        if self.args.track:
            import wandb

            name = self.dir.resolve().name
            wandb.init(id=name, name=name, resume="allow", config=options, sync_tensorboard=True)
        self.writer = SummaryWriter(self.dir, purge_step=self.progress.step + 1)
        rows = "".join(f"\n|{name}|{value}|" for name, value in options.items())
        self.writer.add_text("hyperparameters", f"|option|value|\n|-|-|{rows}", self.progress.step)

    def record(self, episodes: Episodes, advantages: Tensor, new_steps: int, metrics: dict) -> None:
        """Log and show an iteration; evaluate and save if due."""
        if not np.isfinite(metrics["losses/policy_loss"] + metrics["losses/grad_norm"]):
            raise UserError("The update became NaN or infinite: lower --learning-rate.")
        progress = self.progress
        progress.seconds = time.perf_counter() - self.started
        if RANK > 0:
            return
        returns = episodes.rewards.sum(dim=-1)  # [K, G]
        progress.recent_returns = (progress.recent_returns + returns.flatten().tolist())[-100:]
        tied = (advantages == 0).flatten(1).all(dim=1)  # [K]
        if tied.all() and progress.iteration == 1:
            what = "All advantages of the first iteration are 0"
            tqdm.write(f"{what}: nothing to learn from (docs/methods.md, Pitfalls).")
        metrics |= {
            "charts/episodic_return": returns.mean(),
            "charts/episodic_length": len(episodes.obs) / returns.numel(),
            "charts/SPS": progress.step / progress.seconds,
            "charts/learning_rate": self.parts["optimizer"].param_groups[0]["lr"],
            "group/zero_std_frac": tied.double().mean(),
            "group/return_std": returns.std(dim=-1).mean(),
        }
        for name, value in metrics.items():
            self.writer.add_scalar(name, float(value), progress.step)
        mean_return = np.mean(progress.recent_returns)
        shown = f"return={mean_return:.1f}, approx_kl={metrics['losses/approx_kl']:.4f}"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(new_steps)

        interval = self.args.eval_interval
        if interval > 0 and progress.step % interval < new_steps:  # a multiple of it was passed
            self.evaluate_and_save()
        elif time.perf_counter() - self.saved >= self.args.checkpoint_interval:
            self.save_checkpoint()

    def evaluate_and_save(self) -> None:
        """Evaluate the policy; keep it as best.pt if it is the best so far."""
        progress = self.progress
        policy = self.parts["policy"]
        video_dir = self.dir / "videos" / str(progress.step)
        returns = evaluate(policy, self.args, self.EVAL_SEED, video_dir)
        progress.eval_returns = returns.tolist()
        progress.eval_step = progress.step
        self.writer.add_scalar("eval/episodic_return", returns.mean(), progress.step)
        if returns.mean() > progress.best_return:
            progress.best_return = float(returns.mean())
            save(self.dir / "best.pt", self.args, {"policy": policy.state_dict()})
        self.save_checkpoint()  # which knows what best.pt is

    def save_checkpoint(self) -> None:
        self.writer.flush()
        states = {name: part.state_dict() for name, part in self.parts.items()}
        save(self.dir / "checkpoint.pt", self.args, states)
        self.saved = time.perf_counter()

    def finish(self, envs: list[gym.Env]) -> dict:
        """Save, evaluate, report; return run_dir, train_return and what Progress has."""
        self.bar.close()
        for env in envs:
            env.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        progress = self.progress
        if progress.iteration == 0:
            raise UserError("An iteration takes more steps than --total-timesteps: raise that.")
        if RANK > 0:
            return {}
        train_return = float(np.mean(progress.recent_returns))
        rate = progress.step / progress.seconds
        steps = f"{progress.step:,} of {self.args.total_timesteps:,} steps"
        print(f"Trained {steps} in {progress.seconds:.1f} s ({rate:,.0f} steps/s)")
        episodes = len(progress.recent_returns)
        print(f"Training return, last {episodes} episodes: {train_return:.2f}")
        model = self.dir / "model.pt"
        save(model, self.args, {"policy": self.parts["policy"].state_dict()})
        if progress.eval_step < progress.step:
            self.evaluate_and_save()
        self.writer.close()
        print(f"Logs:  tensorboard --logdir {self.dir.parent}")
        play = command("--evaluate", model, self.args)
        drawn = {"human", "rgb_array"}.intersection(envs[0].metadata.get("render_modes", []))
        print(f"Watch: {play} --render" if drawn else f"Play:  {play}")
        return asdict(progress) | {"run_dir": self.dir, "train_return": train_return}


def save(path: Path, args: Args, states: dict) -> None:
    """Write a file whole or not at all: a kill or a full disk leaves the one before."""
    buffer = io.BytesIO()  # torch.save does not say that a disk is full
    torch.save({"script": Path(__file__).stem, "args": asdict(args), **states}, buffer)
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str, parts: dict | None = None) -> Args:
    """Load a file of save's into parts, such as a network; return its options. Or UserError."""
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)  # which runs no code
        if states["script"] != Path(__file__).stem:
            raise UserError(f"it was made by {states['script']}.py")
        for name, part in (parts or {}).items():
            part.load_state_dict(states[name])
        return Args(**states["args"])
    except (UserError, OSError) as error:
        raise UserError(f"Cannot use {path}: {error}") from error
    except KeyError as error:
        why = f"it has no {error}; --resume takes a checkpoint.pt, --evaluate a model.pt"
        raise UserError(f"Cannot use {path}: {why}") from error
    except Exception as error:  # torch.load alone raises half a dozen kinds
        why = "it is not whole, or of other options, another environment or another version"
        raise UserError(f"Cannot use {path}: {why}") from error


def command(option: str, path: Path, args: Args) -> str:
    """What to type to go on with a run or to play a policy."""
    words = ["python", os.path.relpath(__file__), option, str(path)]
    if option == "--resume" and WORLD_SIZE > 1:
        words = ["torchrun", f"--nproc-per-node={WORLD_SIZE}", *words[1:]]
    if ":" in args.env_id:  # which imports a module: see defaults
        words += ["--env-id", args.env_id]
    return shlex.join(words)


def check_args(args: Args) -> None:
    """UserError if an option is out of range, or processes cannot share the groups."""
    lowest = {"total_timesteps": 1, "num_groups": 1, "group_size": 2, "update_epochs": 1}
    lowest |= {"minibatch_size": WORLD_SIZE, "hidden_size": 1, "log_std_init": -20}
    lowest |= {"num_threads": 1, "eval_episodes": 1}
    highest = {"seed": 2**32 - 1, "gamma": 1, "hidden_size": 2**14, "num_threads": 2**10}
    highest |= {"gae_lambda": 1, "decay": 1}
    for name, value in asdict(args).items():
        low = lowest.get(name, 0)
        high = highest.get(name, 2**40)
        if isinstance(value, int | float) and not low <= value <= high:  # NaN fails, too
            option = name.replace("_", "-")
            bound = f"at most {high:,}" if value > high else f"at least {low:,}"
            raise UserError(f"--{option} must be {bound}, not {value}.")
    if args.render and args.capture_video:
        raise UserError("--render and --capture-video exclude each other.")
    if args.num_groups % WORLD_SIZE:
        raise UserError(f"--num-groups must be a multiple of the {WORLD_SIZE} processes.")


def defaults(given: Args) -> Args:
    """The defaults of options not given: with --resume and --evaluate those of the file."""
    args = Args()
    path = given.evaluate or given.resume
    if path:
        args = load(path)
        if ":" in args.env_id and args.env_id != given.env_id:
            raise UserError(f"{path} imports {args.env_id}: if you trust that, give it as --env-id")
    if given.evaluate is not None:
        args = replace(args, seed=1, render=False, capture_video=False)
    if given.render:
        args = replace(args, eval_episodes=5)
    return args


def play_saved(args: Args) -> None:
    """Evaluate the policy of the file args.evaluate."""
    check_args(args)
    torch.set_num_threads(args.num_threads)
    env = make_env(args)
    policy = Policy(env.observation_space, env.action_space, args)
    load(args.evaluate, {"policy": policy})
    env.close()
    video_dir = Path(args.evaluate).parent / "videos" / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    evaluate(policy, args, Run.EVAL_SEED + 10**6 * (args.seed - 1), video_dir)


@dataclass
class Options:
    """Options of a run."""

    algorithm: Algorithm
    environment: Environment
    program: Program


def parse_args(default: Args) -> Args:
    """Read the command line, whose --help shows the options by group."""

    def group(kind):
        return kind(**{option.name: getattr(default, option.name) for option in fields(kind)})

    options = Options(group(Algorithm), group(Environment), group(Program))
    options = tyro.cli(
        Options,
        default=options,
        description=__doc__.partition("\n")[0],
        config=[tyro.conf.OmitArgPrefixes],
    )
    return Args(**vars(options.algorithm), **vars(options.environment), **vars(options.program))


def main() -> None:
    """Train or, with --evaluate, play a saved policy."""
    try:
        given = parse_args(Args())
        args = parse_args(defaults(given))  # again, now that a file's options are the defaults
        if args.evaluate is None:
            train(args)
        else:
            play_saved(args)
    except (UserError, ModuleNotFoundError, gym.error.DependencyNotInstalled) as error:
        tqdm.write(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        tqdm.write(f"Stopped. {Run.go_on}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
