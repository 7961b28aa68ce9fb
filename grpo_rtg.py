"""GRPO with returns-to-go, for Gymnasium environments: one file, no critic.

    python grpo_rtg.py --env-id CartPole-v1
    python grpo_rtg.py --evaluate runs/<run>/model.pt --render --eval-episodes 3

Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, section 4.1) replaces PPO's critic by a group: G
episodes from one start, each judged by the others. The paper's "question" is here an environment's start state, fixed
by env.reset(seed=s). The objective is Eq. 3, also averaged over K groups, with the KL penalty of Eq. 4 in the sum:

    1/G Σ_i 1/|o_i| Σ_t { min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - β D_KL },    ρ = π_θ(a|s) / π_old(a|s)
    D_KL = π_ref/π_θ - log(π_ref/π_θ) - 1

This file's advantage (Kaggle discussion 573162, sb3-contrib issue #301) normalizes all returns-to-go of the group:

    R_{i,t} = Σ_{k≥0} γ^k r_{i,t+k},    Â_{i,t} = (R_{i,t} - mean) / std    over all steps t of all members i

With --baseline timestep each R_{i,t} is compared with the mean over the members still alive at t; std is that of these
differences over all steps of the group.

    paper   here                      paper   here
    G       --group-size              π_old   log_probs, taken once after the rollout
    o_i     an episode (member)       π_ref   reference, set to π_θ every --ref-update-interval iterations
    |o_i|   its number of steps       ε, β    --clip-coef, --kl-coef
    ρ, Â    ratio, advantages         μ       --update-epochs

Departures from the paper (README measures the first three: on CartPole none is needed):
- γ = 0.99 (the paper has none).
- β = 0 (the paper: 0.04).
- The loss averages over all steps alike, as this variant's source has it; --loss-agg trajectory is Eq. 3.
- π_ref is the last iteration's policy by default, for there is no pretrained one: --kl-coef is then a trust region.
- The standard deviation, which the paper leaves open, is the sample one. A group without spread gives 0.
- As usual in reinforcement learning, the gradient's norm is clipped and the learning rate falls to 0.

The algorithm is in train, collect_groups, compute_advantages, step_weights, grpo_loss and update; the rest makes
environments and networks, saves and resumes, reports faults, and splits a run over processes.
"""

import contextlib
import copy
import inspect
import io
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import timeit
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # which NumPy reads when it is imported

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributions import Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Options of a run. docs/results.md has the flags tuned for other environments."""

    env_id: str = "CartPole-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    seed: int = 1  # fixes a new run's initial weights, start states and sampling; with --evaluate, the episodes
    total_timesteps: int = 200_000  # budget in environment steps; an iteration that would exceed it is dropped
    num_groups: int = 4  # K: groups per iteration, each with a start state of its own
    group_size: int = 8  # G: episodes per group
    gamma: float = 0.99  # γ: discount per step
    baseline: Literal["group", "timestep"] = "group"  # subtract the mean of the group, or of those alive at the same t
    norm_std: bool = True  # divide by the group's standard deviation (off: as in Dr. GRPO, arXiv:2503.20783)
    seed_groups: bool = True  # start a group's members in the same state (off: each member has its own seed)
    update_epochs: int = 1  # μ: passes over an iteration's steps
    num_minibatches: int = 16  # gradient steps per pass
    learning_rate: float = 7e-3  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall linearly to 0 over the budget
    clip_coef: float = 0.3  # ε: the ratio is clipped to [1-ε, 1+ε]
    kl_coef: float = 0.0  # β: weight of the KL penalty towards π_ref
    ref_update_interval: int = 1  # iterations from one π_ref ← π_θ to the next (0: π_ref stays the initial policy)
    loss_agg: Literal["trajectory", "step"] = "step"  # mean over each episode first (Eq. 3), or over all steps (DAPO)
    ent_coef: float = 0.0  # weight of an entropy bonus, in nats
    max_grad_norm: float = 0.5  # L2 norm to which the gradient is clipped
    target_kl: float | None = None  # no more passes once the last minibatch's KL(π_old, π_θ) exceeds this, in nats
    hidden_size: int = 64  # units in each of the two hidden layers
    norm_obs: bool = False  # normalize observations by their running mean and variance, which the model keeps
    max_episode_steps: int = 0  # cut episodes after this many steps (0: the environment's limit, 1000 if it has none)
    cuda: bool = False  # train on a GPU if there is one
    num_threads: int = 1  # torch's CPU threads; more than one slows small networks down
    eval_episodes: int = 100  # episodes of a greedy evaluation
    eval_interval: int = 0  # environment steps from one evaluation to the next (0: only at the end)
    checkpoint_interval: int = 10  # iterations from one checkpoint.pt to the next
    resume: str | None = None  # go on from this checkpoint.pt in its folder; its options hold, but for those given
    save_model: bool = True  # write model.pt (the last policy) and best.pt (the best evaluated) into the run's folder
    capture_video: bool = False  # record some of the evaluation's episodes
    track: bool = False  # log to Weights & Biases as well (pip install wandb); WANDB_PROJECT and WANDB_ENTITY say where
    evaluate: str | None = None  # instead of training, play the policy of this model.pt
    greedy: bool = True  # with --evaluate: take the likeliest actions (off: sampled ones, as in training)
    render: bool = False  # with --evaluate: show the episodes in a window


class UserError(ValueError):
    """What the user can put right: the command line prints this one sentence and exits with status 2."""


def check_args(args: Args) -> None:
    """Raise UserError if an option is out of range."""
    for names, low, high in (
        ("group_size", 2, 2**31),
        ("total_timesteps", 1, 2**63),
        ("num_groups update_epochs num_minibatches", 1, 2**31),
        ("hidden_size", 1, 2**14),
        ("num_threads", 1, 2**10),
        ("eval_episodes checkpoint_interval", 1, 2**31),
        ("seed eval_interval max_episode_steps ref_update_interval kl_coef ent_coef", 0, 2**31),
        ("max_grad_norm target_kl", 1e-9, 2**31),
        ("learning_rate clip_coef", 1e-9, 1),
        ("gamma", 0, 1),
    ):
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN is out of every range
                raise UserError(f"--{name.replace('_', '-')} must be from {low:,} to {high:,}, not {value}.")
    if args.render and (not args.evaluate or args.capture_video):
        raise UserError("--render needs --evaluate, and excludes --capture-video.")
    if not args.greedy and not args.evaluate:
        raise UserError("--no-greedy needs --evaluate: training always evaluates greedily.")
    if args.evaluate and args.resume:
        raise UserError("--evaluate excludes --resume.")
    if "" in (args.evaluate, args.resume):
        raise UserError("--evaluate and --resume need the name of a file.")


def make_env(env_id: str, max_episode_steps: int = 0, render_mode: str | None = None, video_dir=None) -> gym.Env:
    """An environment whose observations are flat vectors and whose episodes end; UserError if it cannot be had."""
    try:
        mode = "rgb_array" if video_dir else render_mode
        options = {"max_episode_steps": max_episode_steps or None}
        if mode:
            options["render_mode"] = mode
            probe = gym.make(env_id, disable_env_checker=True)
            probe.close()
            if not {mode, "rgb_array"}.intersection(probe.metadata.get("render_modes", ())):  # images can be shown, too
                raise ValueError(f"it has no render mode {mode}")
        env = gym.make(env_id, disable_env_checker=True, **options)
        if env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, 1000)
        if video_dir:
            env = gym.wrappers.RecordVideo(env, str(video_dir))
        obs_space, action_space = env.observation_space, env.action_space
        can_be_flat = obs_space.is_np_flattenable
    except Exception as error:  # a user's own environment may raise anything
        hint = " (modules are sought beside the script and in PYTHONPATH)" if isinstance(error, ImportError) else ""
        raise UserError(f"Cannot make {env_id}: {' '.join(str(error).split()) or repr(error)}{hint}") from error
    if not can_be_flat:
        raise UserError(f"{env_id} has observations {obs_space}, which cannot be flattened to a vector.")
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    is_continuous = isinstance(action_space, gym.spaces.Box) and action_space.dtype.kind == "f"
    if not is_continuous and not isinstance(action_space, gym.spaces.Discrete):
        raise UserError(f"{env_id} has actions {action_space}; only Discrete and Box of floats are supported.")
    return env


def mlp(num_inputs: int, hidden: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear output, with orthogonal weights and zero biases."""
    first, second, output = nn.Linear(num_inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, num_outputs)
    for layer, gain in (first, 2**0.5), (second, 2**0.5), (output, output_gain):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), output)


class Policy(nn.Module):
    """Observations to a categorical distribution (Discrete actions) or a diagonal Gaussian (Box) over actions."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, hidden_size: int = 64, norm_obs=False):
        super().__init__()
        self.action_space, self.norm_obs = action_space, norm_obs
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        num_outputs = int(action_space.n if self.discrete else np.prod(action_space.shape))
        self.net = mlp(obs_space.shape[0], hidden_size, num_outputs, output_gain=0.01)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(num_outputs))  # the same in every state
        self.register_buffer("obs_mean", torch.zeros(obs_space.shape))
        self.register_buffer("obs_var", torch.ones(obs_space.shape))
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.float64))

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """With norm_obs, observations [B, D] in running standard deviations from the running mean, within ±10."""
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10) if self.norm_obs else obs

    @torch.no_grad()
    def update_obs_stats(self, obs: torch.Tensor) -> None:
        """Merge observations [S, D] into the running mean and variance (Chan et al. 1979)."""
        weight, delta = len(obs) / (self.obs_count + len(obs)), obs.mean(0) - self.obs_mean
        self.obs_var += weight * (obs.var(0, correction=0) - self.obs_var + (1 - weight) * delta**2)
        self.obs_mean += weight * delta
        self.obs_count += len(obs)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Logits (Discrete) or means (Box) [B, A] for observations [B, D]."""
        return self.net(self.normalize(obs))

    def log_prob_and_entropy(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """log π_θ(a|s) [B] and the entropy of π_θ(·|s) [B], in nats, for observations [B, D] and sampled actions."""
        if self.discrete:
            log_probs = self(obs).log_softmax(-1)  # [B, A]
            return log_probs.gather(-1, actions[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
        normal = Normal(self(obs), self.log_std.exp(), validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)

    @torch.no_grad()
    def log_probs(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """log π_θ(a|s) [S] for a rollout's steps, in slices, to bound the memory that wide networks take."""
        slices = zip(obs.split(2048), actions.split(2048))
        return torch.cat([self.log_prob_and_entropy(*each)[0] for each in slices])

    def sampler(self, rng: np.random.Generator | None) -> Callable[[np.ndarray], tuple[np.ndarray, list]]:
        """Gives a function that samples actions from the policy as it is now, π_old; without rng, the greedy ones.

        For observations [B, D] it returns them as [B] counted from 0 (Discrete) or [B, A] (Box), and as env.step wants
        them: counted from the space's start, or clipped to its bounds. The noise is the CPU's: a seed means the same on
        every device. On the CPU net is done in NumPy, which takes a third of torch's time for as few rows as these.
        """
        space, device = self.action_space, self.obs_mean.device
        in_numpy = device.type == "cpu" and all(isinstance(layer, nn.Linear | nn.Tanh) for layer in self.net)
        net = self.net if in_numpy else ()
        layers = [[x.detach().numpy().T.copy() for x in layer.parameters()] for layer in net]
        std = None if self.discrete else self.log_std.detach().exp().cpu().numpy()  # [A]

        def forward(x: np.ndarray) -> np.ndarray:
            if not in_numpy:
                with torch.inference_mode():
                    return self(torch.from_numpy(x).to(device)).cpu().numpy()
            x = self.normalize(torch.from_numpy(x)).numpy() if self.norm_obs else x
            for parameters in layers:  # a Linear's weight and bias; a Tanh has none
                x = x @ parameters[0] + parameters[1] if parameters else np.tanh(x)
            return x

        def sample(obs: np.ndarray) -> tuple[np.ndarray, list]:
            outputs = forward(obs)
            if self.discrete:  # the largest of logits + Gumbel noise is a sample from their softmax
                actions = (outputs if rng is None else outputs + rng.gumbel(size=outputs.shape)).argmax(-1)
                return actions, list((actions + space.start).astype(space.dtype))
            actions = outputs if rng is None else outputs + std * rng.standard_normal(outputs.shape, np.float32)
            return actions, list(actions.reshape(-1, *space.shape).clip(space.low, space.high).astype(space.dtype))

        return sample


def step_envs(envs: list, members, actions: list, seeds: list, times: list, obs: np.ndarray) -> tuple[list, list, list]:
    """Take a step in each environment that members lists, or reset it where its action is None.

    What environment i shows goes into obs[i] [D]; returned are the members' rewards, terminated and truncated. An error
    of the environment, or NaN, infinity, numbers too large to be squared in float32, or a wrong shape or type from it,
    is a UserError that names the environment, its seed, the step (times[i]) and the action.
    """
    rewards, terminated, truncated, size = [], [], [], obs.shape[1]
    try:
        for i, action in zip(members, actions):
            started = action is not None
            step = envs[i].step(action) if started else (envs[i].reset(seed=seeds[i])[0], 0.0, False, False, {})
            seen, reward, is_terminated, is_truncated, _ = step
            if len(seen) != size:  # NumPy would broadcast a single number
                raise ValueError(f"the observation has {len(seen)} numbers instead of {size}")
            if not -1e18 < reward < 1e18:  # False for NaN, too
                raise ValueError(f"reward {reward} is NaN, infinite or too large")
            obs[i] = seen
            rewards.append(float(reward))
            terminated.append(bool(is_terminated))
            truncated.append(bool(is_truncated))
        if not np.vdot(obs, obs) < 1e36:  # False for NaN, too
            found = ((i, action) for i, action in zip(members, actions) if not np.vdot(obs[i], obs[i]) < 1e36)
            i, action = next(found, (i, action))
            raise ValueError(f"observation {obs[i]} is NaN, infinite or too large")
    except Exception as error:  # a user's own environment may raise anything
        where = "in" if action is None else f"at step {times[i]} (action {action}) after"
        line = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{' '.join(f'{type(error).__name__}: {error}'.split())} ({line.filename}:{line.lineno})"
        raise UserError(f"{envs[i].unwrapped} failed {where} reset(seed={seeds[i]}): {what}") from error
    return rewards, terminated, truncated


class Episodes(NamedTuple):
    """One episode of each of N environments: S steps in a flat batch ordered by time, and blocks padded to T steps."""

    obs: torch.Tensor  # [S, D] float32
    actions: torch.Tensor  # [S] int64 (Discrete) or [S, A] float32 (Box, before clipping)
    index: tuple[torch.Tensor, torch.Tensor]  # member [S] and time [S] of each step: rewards[index] is [S]
    rewards: torch.Tensor  # [N, T] float64, 0 in the padding
    mask: torch.Tensor  # [N, T] bool, True where a step was taken


def play_episodes(envs: list, policy: Policy, seeds: list, rng=None, max_steps=float("inf")) -> Episodes | None:
    """Play an episode in every environment from reset(seed=seeds[i]), stepping each only while its episode is alive.

    Actions are sampled with rng, greedy without. None if the episodes together take more than max_steps steps.
    UserError if an environment fails.
    """
    obs = np.empty((len(seeds), *envs[0].observation_space.shape), np.float32)  # [N, D]
    step_envs(envs, range(len(obs)), [None] * len(obs), seeds, [], obs)
    sample, alive, steps, rewards = policy.sampler(rng), np.arange(len(obs)), [], []
    while len(alive) and len(rewards) + len(alive) <= max_steps:
        now = obs[alive]  # a copy
        actions, env_actions = sample(now)
        times = [len(steps)] * len(obs)
        steps.append((now, actions, alive))
        paid, terminated, truncated = step_envs(envs, alive.tolist(), env_actions, seeds, times, obs)
        rewards += paid
        if any(terminated) or any(truncated):
            alive = alive[~np.logical_or(terminated, truncated)]
    if len(alive):
        return None
    flat_obs, actions, member = (torch.from_numpy(np.concatenate(column)) for column in zip(*steps))
    t = torch.from_numpy(np.repeat(np.arange(len(steps)), [len(step[0]) for step in steps]))
    padded = torch.zeros(len(obs), len(steps), dtype=torch.float64)
    mask = torch.zeros(padded.shape, dtype=torch.bool)
    padded[member, t], mask[member, t] = torch.tensor(rewards, dtype=torch.float64), True
    return Episodes(flat_obs, actions, (member, t), padded, mask)


def collect_groups(envs, policy, num_groups, rng, seed_groups=True, max_steps=float("inf")) -> Episodes | None:
    """Sample K groups of G episodes, each group from a fresh seed; group k is the members k·G to (k+1)·G - 1 of envs.

    len(envs) is K·G. With seed_groups False each member has its own seed. None if more than max_steps steps are needed.
    UserError if the members of a group do not start alike.
    """
    group_seeds = rng.integers(2**31, size=num_groups if seed_groups else len(envs))
    seeds = group_seeds.repeat(len(envs) // len(group_seeds)).tolist()
    episodes = play_episodes(envs, policy, seeds, rng, max_steps)
    if episodes is not None and seed_groups:
        starts = episodes.obs[: len(envs)].view(num_groups, len(envs) // num_groups, -1)
        apart = (starts != starts[:, :1]).flatten(1).any(1).tolist()  # [K]
        if any(apart):
            advice = "the members of a group start in different states. Fix its reset(seed), or use --no-seed-groups."
            raise UserError(f"{envs[0].unwrapped} ignores reset(seed={group_seeds[apart.index(True)]}): {advice}")
    return episodes


def compute_advantages(rewards, mask, gamma: float, norm_std: bool = True, baseline: str = "group") -> torch.Tensor:
    """Advantages [K, G, T] of every step from rewards and mask [K, G, T], 0 where mask is False.

    Â_{i,t} = (R_{i,t} - mean) / std with R_{i,t} = Σ_{k≥0} γ^k r_{i,t+k}; the mean over all steps of the group, or with
    baseline "timestep" over the members alive at t; the standard deviation of what is left over all steps of the group.
    """
    if baseline not in ("group", "timestep"):
        raise ValueError(f'baseline must be "group" or "timestep", not {baseline!r}')
    returns_to_go = discounted_sums(rewards.double().where(mask, 0), gamma)
    pooled = (1, 2) if baseline == "group" else 1
    mean = returns_to_go.where(mask, 0).sum(pooled, keepdim=True) / mask.sum(pooled, keepdim=True).clamp(min=1)
    return group_normalize(returns_to_go, mean, mask, norm_std)


def discounted_sums(x: torch.Tensor, gamma: float) -> torch.Tensor:
    """Σ_{j≥t} γ^(j-t) x_j along the last dimension of x."""
    sums, terms = x.clone(), 1
    while terms < x.shape[-1]:  # a sum of n terms and γ^n times the sum of the n that follow: 2n terms
        sums[..., :-terms] += gamma**terms * sums[..., terms:]
        terms *= 2
    return sums


def group_normalize(x: torch.Tensor, mean: torch.Tensor, mask: torch.Tensor, norm_std: bool) -> torch.Tensor:
    """(x - mean) / std, with the sample standard deviation of x - mean in each group; x, mask [K, ...], 0 off the mask.

    A group with no spread beyond float32 rounding (1e-6 of its largest value) gives exactly 0. That stands in for the
    usual small constant in the denominator, so advantages do not depend on the unit of the rewards.
    """
    group = tuple(range(1, x.dim()))
    deviation = (x - mean).where(mask, 0)
    std = (deviation.square().sum(group, keepdim=True) / (mask.sum(group, keepdim=True) - 1).clamp(min=1)).sqrt()
    tied = std <= 1e-6 * x.where(mask, 0).abs().amax(group, keepdim=True)
    return torch.where(tied, 0, deviation / std if norm_std else deviation)


def step_weights(mask: torch.Tensor, loss_agg: str) -> torch.Tensor:
    """Weights [K, G, T] of the steps in the objective, scaled so that the mean over (some of) the steps estimates it.

    "trajectory": 1/(K G |o_i|) times the number of steps (Eq. 3); "step": 1 (DAPO, arXiv:2503.14476).
    """
    weights = mask.double()
    return weights if loss_agg == "step" else weights / weights.sum(-1, keepdim=True) * weights.sum(-1).mean()


def grpo_loss(policy, batch: dict, clip_coef: float, kl_coef: float, ent_coef: float) -> tuple[torch.Tensor, dict]:
    """Minus the objective of Eq. 3 on a flat batch of B steps, and the metrics that are logged.

    batch: obs [B, D], actions, and [B] each: log_probs under π_old, ref_log_probs under π_ref, advantages, weights.
    """
    log_probs, entropies = policy.log_prob_and_entropy(batch["obs"], batch["actions"])
    advantages, weights = batch["advantages"], batch["weights"]
    log_ratio, ref_log_ratio = log_probs - batch["log_probs"], batch["ref_log_probs"] - log_probs
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    policy_loss = -(weights * surrogate).mean()
    kl = (weights * (ref_log_ratio.exp() - ref_log_ratio - 1)).mean()  # Eq. 4
    entropy = (weights * entropies).mean()
    approx_kl = (ratio - 1 - log_ratio).mean()  # KL(π_old, π_θ), http://joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    metrics = {"policy_loss": policy_loss, "kl": kl, "entropy": entropy, "approx_kl": approx_kl, "clipfrac": clipfrac}
    # a term whose coefficient is 0 is left out of the graph
    loss = policy_loss + (kl_coef * kl if kl_coef else 0) - (ent_coef * entropy if ent_coef else 0)
    return loss, {name: x.detach() for name, x in metrics.items()}


@contextlib.contextmanager
def peers():
    """Around what all of torchrun's processes do together: UserError if that fails, most likely as one has ended."""
    try:
        yield
    except RuntimeError as error:
        cause = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"Another process of this run has ended or cannot be reached: {cause}") from error


def share(value) -> list:
    """The value that each of torchrun's processes has, by rank; without torchrun [value]. All of them must call it."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        with peers():
            dist.all_gather_object(values, value)
    return values


class Adam(torch.optim.Adam):
    """torch's, less the decorators by which its methods import torch's compiler: 40% of the start-up, and 70 MiB."""

    add_param_group, load_state_dict, state_dict, step, zero_grad = (
        torch.no_grad()(inspect.unwrap(getattr(torch.optim.Adam, name)))
        for name in ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    )


def update(policy, optimizer, loss_fn, batch: dict, args: Args, rng: np.random.Generator) -> dict[str, float]:
    """Take --update-epochs passes over a flat batch in shuffled minibatches; gives the metrics' means.

    Under torchrun each process has its own batch, and the gradient is the mean of theirs.
    """
    history, sizes = [], share(len(batch["obs"]))
    for _ in range(args.update_epochs):
        order = torch.from_numpy(rng.permutation(len(batch["obs"]))).to(batch["obs"].device)
        shuffled = [x[order].tensor_split(min(args.num_minibatches, *sizes)) for x in batch.values()]
        for minibatch in zip(*shuffled):
            loss, metrics = loss_fn(policy, dict(zip(batch, minibatch)))
            optimizer.zero_grad()
            loss.backward()
            if len(sizes) > 1:
                gradients = [parameter.grad for parameter in policy.parameters()]
                with peers():
                    dist.all_reduce(flat := parameters_to_vector(gradients))
                vector_to_parameters(flat / len(sizes), gradients)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            history.append(torch.stack(list(metrics.values())))
        if args.target_kl is not None and np.mean(share(metrics["approx_kl"].item())) > args.target_kl:
            break
    means = dict(zip(metrics, np.mean(share(torch.stack(history).mean(0).tolist()), axis=0).tolist()))
    if not np.isfinite([means["policy_loss"], means["grad_norm"]]).all():
        raise FloatingPointError("The update became NaN or infinite: lower --learning-rate, or scale the rewards.")
    return means


def evaluate(policy: Policy, args: Args, greedy: bool = True, video_dir=None, seed: int = 10**9) -> np.ndarray:
    """Play --eval-episodes episodes and give their returns; episode i starts from reset(seed=seed + i).

    Played 20 at a time, or one at a time in a window with --render. With video_dir the first environment is recorded.
    """
    envs = [make_env(args.env_id, args.max_episode_steps, "human" if args.render else None, video_dir)]
    if args.render and sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        print("WARNING: no display was found, a window may not open; --capture-video needs none", file=sys.stderr)
    while len(envs) < (1 if args.render else min(args.eval_episodes, 20)):
        envs.append(make_env(args.env_id, args.max_episode_steps))
    seeds, returns = list(range(seed, seed + args.eval_episodes)), []
    rng = None if greedy else np.random.default_rng(seed)
    for first in range(0, len(seeds), len(envs)):
        returns += play_episodes(envs, policy, seeds[first : first + len(envs)], rng).rewards.sum(1).tolist()
    close_envs(envs)  # which also finishes a video
    if video_dir:
        print(f"Videos: {video_dir}")
    return np.array(returns)


def close_envs(envs: list) -> None:
    """Close environments; UserError if one fails in it."""
    try:
        for env in envs:
            env.close()
    except Exception as error:  # a user's own environment may raise anything
        raise UserError(f"{envs[0].unwrapped} failed in close: {type(error).__name__}: {error}") from error


def report(returns: np.ndarray, args: Args) -> None:
    """Print an evaluation, and whether it reaches the threshold that Gymnasium gives for the environment, if any."""
    spread = f"± {returns.std():.2f}, from {returns.min():.2f} to {returns.max():.2f}"
    how = "Greedy" if args.greedy else "Sampled"
    print(f"{how} evaluation, {len(returns)} episodes: return {returns.mean():.2f} {spread}")
    close_envs([env := make_env(args.env_id)])
    threshold = env.spec.reward_threshold
    if threshold is not None and not args.max_episode_steps and len(returns) >= 100:
        print(f"{args.env_id} is {'solved' if returns.mean() >= threshold else 'not solved'} (threshold {threshold:g})")


@dataclass
class Run:
    """Where a run stands between two iterations, besides its networks and its optimizer."""

    iteration: int = 0
    step: int = 0  # environment steps taken
    seconds: float = 0.0
    rng: list | None = None  # states of the generators of random numbers, one for each process
    recent: list = field(default_factory=list)  # returns of the last 100 training episodes
    scalars: dict = field(default_factory=dict)  # what was logged at this step
    best: float = float("-inf")  # mean return of the best evaluation
    next_eval: int = 0  # step from which on the next of --eval-interval's evaluations is due


def save(path: Path, args: Args, run: Run, **parts) -> None:
    """Write what load reads: whole or not at all, so that a kill or a full disk leaves the file as it was."""
    states = {name: part.state_dict() for name, part in parts.items()}
    buffer, temporary = io.BytesIO(), path.with_suffix(".part")
    torch.save({"script": Path(__file__).stem, "args": asdict(args), "run": asdict(run), **states}, buffer)
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # which need not name the file
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, path) from error


def load(path: str, env_id: str) -> tuple[Args, Run, dict]:
    """The options, the run and the parts' states in a file of this script's, on the CPU; UserError if it is none.

    A stranger's file runs no code: it is read as plain data, and if making its environment imports a module
    ("module:Env-v0"), env_id must be the same.
    """
    try:
        saved = dict(torch.load(path, map_location="cpu", weights_only=True))
        if saved["script"] != Path(__file__).stem:
            raise UserError(f"{path} was made by {saved['script']}.py: use it with that script.")
        args, run = Args(**saved["args"]), Run(**saved["run"])
        check_args(args)
        if ":" in args.env_id and args.env_id != env_id:
            raise UserError(f"{path} would import a module: if you trust it, add --env-id {shlex.quote(args.env_id)}")
    except UserError:
        raise
    except Exception as error:  # torch.load alone raises half a dozen kinds
        raise UserError(f"Cannot read {path} ({getattr(error, 'strerror', None) or type(error).__name__}).") from error
    return args, run, saved


def restore(path: str, saved: dict, **parts) -> None:
    """Give networks and optimizer the states that load found; UserError if they do not fit."""
    for name, part in parts.items():
        try:
            part.load_state_dict(saved[name])
        except Exception as error:
            problem = "does not fit the options" if name in saved else "is missing (a checkpoint.pt has it)"
            raise UserError(f"Cannot use {path}: its {name} {problem}.") from error


def compare_devices(policy: Policy, num_envs: int) -> str:
    """How long choosing actions takes on the GPU and on the CPU, and what that means for the user."""
    obs, milliseconds = np.zeros((num_envs, len(policy.obs_mean)), np.float32), []
    for device in (policy.obs_mean.device, "cpu"):
        sample = copy.deepcopy(policy).to(device).sampler(None)
        milliseconds.append(1000 * min(timeit.repeat(partial(sample, obs), number=1, repeat=50)))
    gpu, cpu = milliseconds
    advice = ": so small a network may train faster without --cuda" if gpu > cpu else ""
    return f"Choosing actions takes {gpu:.2f} ms a time step on the GPU, {cpu:.2f} ms on the CPU{advice}"


def open_run(args: Args, spec, device: torch.device, run: Run) -> tuple[Path, SummaryWriter]:
    """Make the run's folder and open its logs; a resumed run goes on in its own, less what it logged after run.step."""
    if args.capture_video:  # its error comes now, not after training
        with tempfile.TemporaryDirectory() as folder:
            make_env(args.env_id, video_dir=Path(folder, "videos")).close()
    if args.track:
        try:
            import wandb
        except ImportError as error:
            raise UserError("--track needs Weights & Biases: pip install wandb") from error
    run_dir = Path(args.resume or "").parent
    if not args.resume:
        env_name = args.env_id.replace("/", "-").replace(":", "-")
        run_dir = Path("runs", f"{env_name}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}")
        run_dir.mkdir(parents=True)  # an error if another run has it
    if args.track:
        name = run_dir.resolve().name  # of "checkpoint.pt" alone, too
        wandb.init(id=name, name=name, resume="allow", config=asdict(args), sync_tensorboard=True)
    writer = SummaryWriter(str(run_dir), purge_step=run.step if args.resume else None)
    for name, value in run.scalars.items():
        writer.add_scalar(name, value, run.step)
    rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|option|value|\n|-|-|\n{rows}", run.step)
    if args.cuda and device.type == "cpu":
        print("WARNING: --cuda was asked for but torch finds no GPU; USING THE CPU", file=sys.stderr)
    if not args.max_episode_steps and gym.spec(spec.id).max_episode_steps is None:
        print(f"{spec.id} is registered without a time limit: episodes are cut after 1,000 steps (--max-episode-steps)")
    on_cpu = f"CPU, {args.num_threads} thread(s)"
    print("Device:", on_cpu if device.type == "cpu" else torch.cuda.get_device_name(device))
    return run_dir, writer


def train(args: Args, signals=()) -> dict:
    """Train, save and evaluate; returns steps, seconds, train_return (last 100 episodes), eval_returns and run_dir.

    With args.resume, too, all options are those of args; only the command line fills in the checkpoint's.
    A signal's number in signals ends it after the iteration under way: a checkpoint, then SystemExit(128 + number).
    Each of torchrun's processes plays its share of the groups; the first alone saves, logs, shows and returns.
    """
    check_args(args)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))  # torchrun's
    if args.num_groups % world:
        raise UserError(f"--num-groups {args.num_groups} cannot be split over {world} processes.")
    num_groups = args.num_groups // world
    trained, run, saved = load(args.resume, args.env_id) if args.resume else (args, Run(), {})
    if trained.env_id != args.env_id:
        raise UserError(f"{args.resume} was trained on {trained.env_id}, not on {args.env_id}.")
    if run.step > args.total_timesteps:
        raise UserError(f"{args.resume} has taken {run.step} steps: --total-timesteps {args.total_timesteps} is less.")
    if run.rng and len(run.rng) != world:
        raise UserError(f"{args.resume} is of a run of {len(run.rng)} processes, not {world}.")
    envs = [make_env(args.env_id, args.max_episode_steps) for _ in range(num_groups * args.group_size)]
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if args.cuda and torch.cuda.is_available():
        num_gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        if num_gpus < max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))):  # in all processes alike
            raise UserError(f"--cuda needs a GPU for each process, and this machine has {num_gpus}.")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # or every process would take memory on the first GPU, too
    if world > 1:
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        except ValueError as error:
            raise UserError(f"WORLD_SIZE is {world}, but this is no process of torchrun's: {error}") from error
    policy = Policy(envs[0].observation_space, envs[0].action_space, args.hidden_size, args.norm_obs).to(device)
    reference = copy.deepcopy(policy)
    optimizer = Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
    parts = {"policy": policy, "reference": reference, "optimizer": optimizer}
    if args.resume:
        restore(args.resume, saved, **parts)
    run_dir, writer = open_run(args, envs[0].spec, device, run) if rank == 0 else (None, None)
    if device.type == "cuda" and rank == 0:
        print(compare_devices(policy, len(envs)))
    loss_fn = partial(grpo_loss, clip_coef=args.clip_coef, kl_coef=args.kl_coef, ent_coef=args.ent_coef)
    rng = np.random.default_rng([args.seed, rank])
    run.rng = run.rng or share(rng.bit_generator.state)
    rng.bit_generator.state = run.rng[rank]
    told, first_step, start = False, run.step, time.perf_counter() - run.seconds
    # disable=None: on a terminal only; elsewhere a line at each tenth of the budget
    bar = tqdm(total=args.total_timesteps, initial=run.step, unit=" steps", unit_scale=True, disable=rank > 0 or None)
    while True:
        try:
            if any(stops := share(signals[:1])):
                sys.exit(128 + max(stops)[0])
            if writer and args.eval_interval and run.step >= run.next_eval:
                evaluate_run(args, run, run_dir, writer, policy)
                run.next_eval = run.step - run.step % args.eval_interval + args.eval_interval
            if run.iteration % args.checkpoint_interval == 0:
                checkpoint(args, run, run_dir, writer, parts)
            max_steps = max(args.total_timesteps - run.step, 0)
            episodes = collect_groups(envs, policy, num_groups, rng, args.seed_groups, max_steps)
            sizes = share(max_steps + 1 if episodes is None else len(episodes.obs))  # steps of each process
        except (UserError, SystemExit, KeyboardInterrupt):  # a signal or an environment's fault: keep what was learned
            bar.close()  # or what is printed next would be on its line
            checkpoint(args, run, run_dir, writer, parts, stopping=True)
            raise
        if sum(sizes) > max_steps:
            break
        if run.iteration == 0 and min(sizes) < args.num_minibatches:
            raise UserError(f"--num-minibatches {args.num_minibatches} is more than the {min(sizes)} steps.")
        # Algorithm 1: π_ref, the advantages, a flat batch of the steps really taken, the update
        refreshed = args.ref_update_interval and run.iteration % args.ref_update_interval == 0
        if refreshed:
            reference.load_state_dict(policy.state_dict())
        budget_left = 1 - run.step / args.total_timesteps
        optimizer.param_groups[0]["lr"] = args.learning_rate * (budget_left if args.anneal_lr else 1)
        rewards, mask = (x.view(num_groups, args.group_size, -1) for x in (episodes.rewards, episodes.mask))
        advantages = compute_advantages(rewards, mask, args.gamma, args.norm_std, args.baseline)
        batch = {"obs": episodes.obs.to(device), "actions": episodes.actions.to(device)}
        for name, block in (("advantages", advantages), ("weights", step_weights(mask, args.loss_agg))):
            batch[name] = block.flatten(0, 1)[episodes.index].float().to(device)
        if args.loss_agg == "step":
            batch["weights"] *= sizes[rank] * world / sum(sizes)  # each step counts alike, whichever process took it
        batch["log_probs"] = batch["ref_log_probs"] = policy.log_probs(batch["obs"], batch["actions"])
        if not refreshed:
            batch["ref_log_probs"] = reference.log_probs(batch["obs"], batch["actions"])
        metrics = update(policy, optimizer, loss_fn, batch, args, rng)
        if args.norm_obs:
            policy.update_obs_stats(torch.cat(share(episodes.obs)).to(device))

        no_signal = (advantages == 0).flatten(1).all(1)
        shared = share((rewards.sum(-1), mask.sum(-1).double(), no_signal, rng.bit_generator.state))
        *blocks, run.rng = map(list, zip(*shared))
        returns, lengths, no_signal = map(torch.cat, blocks)  # [K, G], [K, G], [K] of all processes
        run.iteration, run.step = run.iteration + 1, run.step + sum(sizes)
        run.recent = (run.recent + returns.flatten().tolist())[-100:]
        run.seconds = time.perf_counter() - start
        if no_signal.all() and writer and not told:
            told, why = True, "the members of every group tied"
            if len(rewards[mask].unique()) == 1 and (returns.std(-1) > 0).any():
                why = f"every step paid {rewards[mask][0]:g} and an episode's length does not count here"
            tell(bar, f"No signal at step {run.step:,}: all advantages are 0, because {why}. This is said once.")
        scalars = {f"losses/{name}": value for name, value in metrics.items()}
        scalars |= {"charts/episodic_return": returns.mean(), "charts/episodic_length": lengths.mean()}
        scalars |= {"charts/SPS": run.step / run.seconds, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
        scalars |= {"group/zero_std_frac": no_signal.double().mean(), "group/return_std": returns.std(-1).mean()}
        run.scalars = {name: float(value) for name, value in scalars.items()}
        for name, value in run.scalars.items() if writer else ():
            writer.add_scalar(name, value, run.step)
        bar.update(sum(sizes))
        bar.set_postfix({"return": f"{np.mean(run.recent):.1f}", "kl": f"{metrics['kl']:.4f}"}, refresh=False)
        tenth = args.total_timesteps / 10
        if writer and bar.disable and run.step // tenth > (run.step - sum(sizes)) // tenth:
            tell(bar, f"{run.step:,} steps in {run.seconds:.0f} s: return {np.mean(run.recent):.1f}")
    bar.close()
    if run.iteration == 0:
        raise UserError(f"--total-timesteps {args.total_timesteps} allows no iteration: its episodes take more steps.")
    if writer and run.step == first_step:
        tell(bar, f"Nothing is left to train: another iteration would exceed --total-timesteps {args.total_timesteps}.")
    run.seconds = time.perf_counter() - start
    if world > 1:
        dist.destroy_process_group()
    summary = finish_run(args, run, run_dir, writer, parts) if writer else {}
    close_envs(envs)
    return summary


def tell(bar: tqdm, line: str) -> None:
    """Print a line to standard error, above the progress bar if there is one. Nobody may be left to read it."""
    with contextlib.suppress(OSError):
        bar.write(line, file=sys.stderr)


def checkpoint(args: Args, run: Run, run_dir: Path, writer, parts: dict, stopping: bool = False) -> None:
    """Write what --resume needs to go on as if there had been no stop."""
    if not writer:
        return  # another of torchrun's processes writes
    writer.flush()
    save(run_dir / "checkpoint.pt", args, run, **parts)
    if stopping and run.iteration:
        command = next_command(args, "--resume", run_dir / "checkpoint.pt")
        print(f"Stopped after {run.step:,} of {args.total_timesteps:,} steps. Resume: {command}", file=sys.stderr)


def evaluate_run(args: Args, run: Run, run_dir: Path, writer, policy, video_dir=None) -> np.ndarray:
    """Evaluate greedily, log it and keep the best policy, without training's environments and random numbers."""
    returns = evaluate(policy, args, video_dir=video_dir)
    if "eval/episodic_return" not in run.scalars:
        run.scalars["eval/episodic_return"] = float(returns.mean())
        writer.add_scalar("eval/episodic_return", returns.mean(), run.step)
    if returns.mean() > run.best:
        run.best = float(returns.mean())
        if args.save_model:
            save(run_dir / "best.pt", args, run, policy=policy)
    return returns


def finish_run(args: Args, run: Run, run_dir: Path, writer, parts: dict) -> dict:
    """Save and evaluate the policy, and print the results, where they lie and what to type next."""
    model, train_return = run_dir / "model.pt", np.mean(run.recent) if run.recent else np.nan
    if args.save_model:
        save(model, args, run, policy=parts["policy"])
    checkpoint(args, run, run_dir, writer, parts)  # before a word is printed: nobody may be left to read it
    print(f"Trained {run.step:,} steps in {run.seconds:.1f} s ({run.step / run.seconds:,.0f} steps/s)")
    print(f"Training return, last 100 episodes: {train_return:.2f}")
    print(f"Logs:  tensorboard --logdir {run_dir.parent}")
    if args.save_model:
        print(f"Model: {model}")
    video_dir = run_dir / "videos" if args.capture_video else None
    eval_returns = evaluate_run(args, run, run_dir, writer, parts["policy"], video_dir)
    checkpoint(args, run, run_dir, writer, parts)
    writer.close()
    report(eval_returns, args)
    if args.eval_interval:
        best = run_dir / "best.pt"
        print(f"Best evaluation: {run.best:.2f}" + (f", kept in {best}" if best.exists() else ""))
    if args.save_model:
        command, env = next_command(args, "--evaluate", model), make_env(args.env_id)
        shown = {"human", "rgb_array"}.intersection(env.metadata.get("render_modes", ()))
        close_envs([env])
        print(f"Watch: {command} --render --eval-episodes 3" if shown else f"Evaluate again: {command}")
    summary = {"steps": run.step, "seconds": run.seconds, "train_return": train_return, "eval_returns": eval_returns}
    return summary | {"run_dir": run_dir}


def next_command(args: Args, option: str, path: Path) -> str:
    """What to type to go on with one of the run's files."""
    module = ["--env-id", args.env_id] if ":" in args.env_id else []  # see load
    world = os.environ.get("WORLD_SIZE", "1")  # a run is resumed by as many processes
    start = ["torchrun", f"--nproc-per-node={world}"] if option == "--resume" and world != "1" else ["python"]
    return shlex.join([*start, os.path.relpath(__file__), option, str(path), *module])


def catch_signals() -> list[int]:
    """A list to which the first Ctrl-C or SIGTERM adds its number; the next one ends the process at once."""
    signals = []

    def note(number: int, frame) -> None:
        signals.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # nobody may be left to read it
            os.write(2, b"\nStopping after this iteration or evaluation; once more stops at once.\n")

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return signals


def main() -> None:
    """Train, or with --evaluate play a saved model, as the command line says."""
    try:
        args = tyro.cli(Args)
        if not args.evaluate:
            shown = threading.excepthook  # a full disk stops the logs' thread, but add_scalar raises its error, too
            threading.excepthook = lambda hook: None if isinstance(hook.exc_value, OSError) else shown(hook)
            if args.resume:
                args = tyro.cli(Args, default=load(args.resume, args.env_id)[0])
            train(args, catch_signals())
            return
        check_args(args)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just ends it
        trained, _, saved = load(args.evaluate, args.env_id)
        kept = {name: getattr(trained, name) for name in ("env_id", "max_episode_steps", "hidden_size", "norm_obs")}
        args = tyro.cli(Args, default=Args(**kept))
        if args.env_id != trained.env_id:
            raise UserError(f"{args.evaluate} was trained on {trained.env_id}, not on {args.env_id}.")
        torch.set_num_threads(args.num_threads)
        env = make_env(args.env_id)
        policy = Policy(env.observation_space, env.action_space, args.hidden_size, args.norm_obs)
        restore(args.evaluate, saved, policy=policy)
        close_envs([env])
        print(f"Playing {args.env_id} with the policy in {args.evaluate}, on the CPU")
        model, how = Path(args.evaluate), "greedy" if args.greedy else "sampled"
        video_dir = model.parent / f"videos-{model.stem}-{how}-{args.seed}" if args.capture_video else None
        first_seed = 10**9 + 10**6 * (args.seed - 1)  # by default the episodes of training's evaluations
        report(evaluate(policy, args, args.greedy, video_dir, first_seed), args)
    except (UserError, FloatingPointError, OSError) as error:
        if isinstance(error, OSError):  # a full disk, a folder that is not the user's
            error = f"Cannot write {os.fsdecode(error.filename or 'the output')}: {error.strerror}."
        tqdm.write(f"{Path(__file__).name}: {error}", file=sys.stderr)  # on a line of its own, not the bar's
        sys.exit(2)


if __name__ == "__main__":
    main()
