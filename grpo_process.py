"""GRPO with process supervision: PPO's objective, a group in place of a critic.

    python grpo_process.py --env-id Acrobot-v1
    python grpo_process.py --evaluate runs/<run>/checkpoint.pt --render

Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, section 4.1) compares each of G
outputs to a question with their mean. Here a question is a reset seed, which fixes start and luck,
and an output an episode. The objective is Eq. 3 with the KL term of Eq. 4, averaged over K groups:

    1/G Σ_i 1/|o_i| Σ_t { min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - β D_KL },    ρ = π_θ(a|s) / π_old(a|s)
    D_KL = π_ref/π_θ - log(π_ref/π_θ) - 1

The advantage (section 4.1.3) sums a step's reward and those that follow, each normalized over the
group's steps; it is 0 where every step pays the same, as on CartPole:

    r̃_{i,t} = (r_{i,t} - mean(r)) / std(r),    Â_{i,t} = Σ_{j≥t} γ^(j-t) r̃_{i,j}

Departures from Algorithm 1, whose steps are iterations here:
1. Rewards are the environment's, so line 12 (a reward model's training) is missing.
2. No policy is pretrained, so β is 0.
3. The mean is over all steps (--loss-agg trajectory: Eq. 3).
4. The μ passes go in minibatches, and end early (--target-kl).
5. Gradients are clipped, log-ratios bounded, the learning rate falls, γ < 1, entropy has a bonus.
6. An episode that a time limit cuts counts as complete.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "numpy==2.4.6",
#   "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "moviepy==2.2.1"]
# ///

import json
import math
import os
import random
import re
import shlex
import sys
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """GRPO with process supervision."""

    env_id: str = "Acrobot-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    env_kwargs: str = "{}"  # for gym.make, as '{"is_slippery": false, "max_episode_steps": 50}'
    total_timesteps: int = 500_000  # environment steps; the iteration that reaches them is the last
    seed: int = 1  # fixes weights, start states and sampling
    exp_name: str = Path(__file__).stem  # stands in the name of the run's folder

    num_groups: int = 4  # groups played at a time by each process, until a minibatch is full
    group_size: int = 8  # G: episodes per group
    seed_groups: bool = True  # start a group in one state (off: a seed for each member)
    gamma: float = 0.99  # γ: discount per step
    norm_std: bool = True  # divide by the standard deviation (off: as Dr. GRPO, arXiv:2503.20783)

    update_epochs: int = 8  # μ: passes over an iteration's steps
    minibatch_size: int = 1024  # about how many steps a gradient step sees
    learning_rate: float = 5e-3  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall linearly to 0
    clip_coef: float = 0.2  # ε: the ratio is clipped to [1-ε, 1+ε]
    kl_coef: float = 0.0  # β: weight of the KL penalty towards π_ref
    ref_update_interval: int = 0  # M: iterations between π_ref ← π_θ (0: the initial policy stays)
    loss_agg: Literal["trajectory", "step"] = "step"  # mean over episodes (Eq. 3) or steps (DAPO)
    ent_coef: float = 0.001  # weight of an entropy bonus (nats): the gradient where all groups tie
    max_grad_norm: float = 0.5  # L2 norm to which a network's gradient is clipped (0: it is not)
    target_kl: float = 0.05  # end an update once KL(π_old, π_θ) exceeds this, in nats (0: never)

    hidden_size: int = 64  # units in each of the two hidden layers
    log_std_init: float = 0.0  # log of the Gaussian's initial standard deviation (Box)
    norm_obs: bool = False  # observations to mean 0, std 1, within ±10 (iteration 1: only clipped)
    cuda: bool = False  # train on a GPU if there is one

    eval_interval: int = 0  # iterations between evaluations (0: only after training)
    eval_episodes: int = 100  # episodes of an evaluation
    greedy: bool = True  # evaluate with the likeliest actions (off: sampled ones, as in training)
    render: bool = False  # show the episodes of evaluations in a window, one by one
    capture_video: bool = False  # film each evaluation's first episode (not if --render)
    track: bool = False  # log to Weights & Biases as well (pip install wandb)
    checkpoint_interval: float = 10.0  # seconds between checkpoints
    resume: str | None = None  # go on from this checkpoint.pt; options not given are the file's
    evaluate: str | None = None  # play the policy of this file; options not given are the file's


def compute_advantages(
    rewards: Tensor, mask: Tensor, gamma: float, norm_std: bool = True
) -> Tensor:
    """Advantages [K, G, T] from rewards and mask [K, G, T], which are padded at the end; 0 there.

    A group whose rewards tie, up to float32's rounding, gives exactly 0.
    """
    rewards = rewards.double().where(mask, 0)
    num_steps = mask.sum(dim=(1, 2), keepdim=True)  # of the group, [K, 1, 1]
    mean = rewards.sum(dim=(1, 2), keepdim=True) / num_steps
    centered = (rewards - mean).where(mask, 0)

    variance = centered.square().sum(dim=(1, 2), keepdim=True) / (num_steps - 1).clamp(min=1)
    std = variance.sqrt()
    tied = std <= 1e-7 * rewards.abs().amax(dim=(1, 2), keepdim=True)
    normalized = centered / std if norm_std else centered  # r̃
    advantages = normalized.where(~tied, 0)  # and now, from the end, Σ_{j≥t} γ^(j-t) r̃_j
    for t in reversed(range(advantages.shape[-1] - 1)):
        advantages[..., t] += gamma * advantages[..., t + 1]
    return advantages


def advantages_of(episodes: "Episodes", args: Args) -> Tensor:
    """Advantages [K, G, T]; train takes any other function of this form in its place."""
    return compute_advantages(episodes.rewards, episodes.mask, args.gamma, args.norm_std)


def step_weights(mask: Tensor, loss_agg: str) -> Tensor:
    """Weights [K, G, T] of mean 1 with which the plain mean over all steps is that of loss_agg.

    "trajectory": 1/(K G) Σ_i 1/|o_i| Σ_t x (Eq. 3). "step": the plain mean (DAPO).
    """
    weights = mask.double()
    if loss_agg == "trajectory":
        weights /= weights.sum(dim=-1, keepdim=True)  # |o_i|
    return weights / weights[mask].mean()


def grpo_loss(policy, batch: dict, args: Args) -> tuple[Tensor, dict]:
    """Minus (Eq. 3 + an entropy bonus) on a flat batch of B steps, and the metrics to log.

    batch: obs [B, D], actions [B, A], and [B] each: old_log_probs, ref_log_probs, advantages,
    weights (by step_weights). policy(obs) gives a distribution whose log_prob is [B].
    """
    distribution = policy(batch["obs"])
    log_probs = distribution.log_prob(batch["actions"])
    advantages = batch["advantages"]
    assert log_probs.shape == advantages.shape  # [B, B] would broadcast, silently
    weights = batch["weights"]

    # In an iteration's first gradient step ρ = 1 and nothing is clipped: the plain policy gradient.
    log_ratio = (log_probs - batch["old_log_probs"]).clamp(max=20)  # log π_θ/π_old, bounded for exp
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.min(ratio * advantages, clipped_ratio * advantages)
    policy_loss = -(weights * surrogate).mean()  # Eq. 3: see step_weights

    ref_log_ratio = (batch["ref_log_probs"] - log_probs).clamp(max=20)  # log π_ref/π_θ
    kl = (weights * (ref_log_ratio.exp() - ref_log_ratio - 1)).mean()  # Eq. 4
    entropy = (weights * distribution.entropy()).mean()
    loss = policy_loss + args.kl_coef * kl - args.ent_coef * entropy
    metrics = {
        "losses/policy_loss": policy_loss.detach(),
        "losses/kl": kl.detach(),
        "losses/entropy": entropy.detach(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean().detach(),  # estimates KL(π_old, π_θ)
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
        self.action_space = action_space
        self.continuous = isinstance(action_space, spaces.Box) and action_space.dtype != bool
        if self.continuous:
            num_outputs = math.prod(action_space.shape)
            self.log_std = nn.Parameter(args.log_std_init * torch.ones(num_outputs))
        else:
            nvec = num_options(action_space)  # [A]
            missing = torch.arange(nvec.max()) >= nvec[:, None]  # [A, C]
            padding = torch.where(missing, -1e9, 0.0)  # added to logits: never chosen
            self.register_buffer("padding", padding, persistent=False)
            num_outputs = missing.numel()
        self.net = mlp(obs_space.shape[0], args.hidden_size, num_outputs, output_gain=0.01)
        self.norm_obs = args.norm_obs
        self.register_buffer("obs_count", torch.zeros(()).double())
        self.register_buffer("obs_mean", torch.zeros(obs_space.shape).double())
        self.register_buffer("obs_var", torch.ones(obs_space.shape).double())

    def normalize(self, obs: Tensor) -> Tensor:
        """obs [B, D] as the network takes them."""
        if self.norm_obs:
            obs = obs + -self.obs_mean  # float64; torch does not subtract from bools
            obs.div_((self.obs_var + 1e-8).sqrt()).clamp_(-10, 10)
        return obs.float()

    @torch.no_grad()
    def update_obs_stats(self, obs: Tensor) -> None:
        """Merge observations [S, D] into the statistics of normalize (Chan et al. 1979)."""
        mean = obs.sum(dim=0, dtype=torch.float64) / len(obs)
        var = (obs + -mean).square_().sum(dim=0) / len(obs)
        weight = len(obs) / (self.obs_count + len(obs))
        delta = mean - self.obs_mean
        self.obs_var += weight * (var - self.obs_var + (1 - weight) * delta.square())
        self.obs_mean += weight * delta
        self.obs_count += len(obs)

    def forward(self, obs: Tensor) -> Independent:
        """π_θ(·|s) for obs [B, D]."""
        outputs = self.net(self.normalize(obs))
        if self.continuous:
            per_action = Normal(outputs, self.log_std.exp(), validate_args=False)
        else:
            logits = outputs.view(-1, *self.padding.shape) + self.padding  # [B, A, C]
            per_action = Categorical(logits=logits, validate_args=False)
        return Independent(per_action, 1, validate_args=False)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, greedy: bool = False) -> np.ndarray:
        """Actions [B, A] for observations [B, D]: sampled, or the likeliest."""
        distribution = self(torch.from_numpy(obs).to(self.obs_mean.device))
        actions = distribution.mode if greedy else distribution.sample()
        return actions.cpu().numpy()

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions [B, A] as env.step takes them: a Box's scaled and clipped, others plus start."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        if self.continuous:
            bounded = space.high.astype(float) / 2 - space.low / 2 < 1e6  # others are not scaled
            low = np.where(bounded, space.low, -1.0)
            high = np.where(bounded, space.high, 1.0)
            actions = low + (high - low) * (actions + 1) / 2  # the policy's [-1, 1] is all of it
            actions = actions.clip(space.low, space.high)
            if space.dtype.kind in "iu":  # counts, as orders of an inventory
                actions = actions.round()
        else:
            actions = actions + getattr(space, "start", 0)
        return actions.astype(space.dtype)

    def predict(self, obs, greedy: bool = True):
        """What env.step takes, for one observation of an environment by make_env."""
        return self.to_env(self.act(np.reshape(obs, (1, -1)), greedy))[0]


def num_options(space: spaces.Space) -> Tensor:
    """How many options each of the A choices of an action has, [A]."""
    if isinstance(space, spaces.Discrete):
        return torch.tensor([int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        return torch.tensor(space.nvec.flatten().tolist())
    if isinstance(space, spaces.MultiBinary):
        return torch.full((math.prod(space.shape),), 2)
    kinds = "Discrete, MultiDiscrete, MultiBinary or a Box of numbers"
    raise UserError(f"Actions must be {kinds}, not {space}: wrap the environment.")


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


def play(envs: list[gym.Env], policy: Policy, seeds: list[int], greedy: bool = False):
    """Play an episode in each environment, from reset(seed=seeds[i]) to its end.

    Yields each step: the episode's number i, observation, action, reward, whether a time limit cut
    the episode there, and the info. UserError for NaN, infinity, unlike starts of equal seeds.
    """
    running = {i: np.array(envs[i].reset(seed=seed)[0]) for i, seed in enumerate(seeds)}
    for i in range(1, len(seeds)):
        alike = np.array_equal(running[i], running[i - 1], equal_nan=True)
        if seeds[i] == seeds[i - 1] and not alike:  # members of one group
            cause = "the environment ignores reset(seed), or its constructor draws"
            raise UserError(f"Equal seeds start unlike: {cause}. Mend that, or --no-seed-groups.")
    while running:
        obs = np.array(list(running.values())).reshape(len(running), -1)
        if not np.isfinite(obs).all():
            raise UserError(f"NaN or infinity observed in an episode of seeds {set(seeds)}.")
        actions = policy.act(obs, greedy)
        env_actions = policy.to_env(actions)
        for row, i in enumerate(list(running)):
            next_obs, reward, terminated, truncated, info = envs[i].step(env_actions[row])
            running[i] = np.array(next_obs)  # a copy: some environments write into one array
            number = np.float64(reward).item()  # some are arrays of one number
            if not math.isfinite(number):
                raise UserError(f"A reward is {reward}, in the episode of seed {seeds[i]}.")
            yield i, obs[row], actions[row], number, bool(truncated and not terminated), info
            if terminated or truncated:
                del running[i]


class Episodes(NamedTuple):
    """K groups of G episodes: S steps in all, at most T in one episode."""

    obs: Tensor  # [S, D], by episode, then by time: the order of rewards[mask]
    actions: Tensor  # [S, A]
    rewards: Tensor  # [K, G, T] float64, 0 where there is no step
    mask: Tensor  # [K, G, T] bool, True where there is a step
    truncated: Tensor  # [K, G] bool, True where a time limit cut the episode: for advantages_of
    infos: list[dict]  # K·G, the last one of each episode


def collect_groups(envs: list[gym.Env], policy: Policy, args: Args) -> Episodes:
    """Play an episode in each environment, again until the steps fill a minibatch.

    With --seed-groups the members of a group start from one reset seed.
    """
    episodes = []  # each a list of steps: observation, action, reward, cut by a time limit
    infos = []  # the last one of each
    while sum(map(len, episodes)) < args.minibatch_size:
        num_seeds = args.num_groups if args.seed_groups else len(envs)
        seeds = torch.randint(2**31, (num_seeds,))  # line 5: the start states
        seeds = seeds.repeat_interleave(len(envs) // num_seeds).tolist()
        first = len(episodes)
        episodes += [[] for _ in envs]
        infos += [{} for _ in envs]
        for i, *step, info in play(envs, policy, seeds):  # lines 7 and 8
            episodes[first + i].append(step)
            infos[first + i] = dict(info)  # a copy: some environments write into one

    lengths = torch.tensor([len(episode) for episode in episodes]).view(-1, args.group_size, 1)
    mask = torch.arange(lengths.max()) < lengths
    columns = zip(*(step for steps in episodes for step in steps))  # by episode, then by time
    obs, actions, rewards, _ = (torch.from_numpy(np.array(column)) for column in columns)
    rewards = torch.zeros(mask.shape).double().masked_scatter(mask, rewards)
    truncated = torch.tensor([steps[-1][-1] for steps in episodes]).view(mask.shape[:2])
    return Episodes(obs, actions, rewards, mask, truncated, infos)


@torch.no_grad()
def make_batch(episodes: Episodes, advantages: Tensor, policy, reference, args: Args) -> dict:
    """The S steps of the episodes as grpo_loss takes them, on the policy's device."""
    if advantages.shape != episodes.mask.shape or not advantages.isfinite().all():
        raise UserError("Advantages must be [K, G, T] and finite: 0 for ties and lone members.")
    device = policy.obs_mean.device
    obs = episodes.obs.to(device)
    actions = episodes.actions.to(device)
    weights = step_weights(episodes.mask, args.loss_agg)
    return {
        "obs": obs,
        "actions": actions,
        "advantages": advantages[episodes.mask].float().to(device),
        "weights": weights[episodes.mask].float().to(device),
        "old_log_probs": policy(obs).log_prob(actions),  # of π_old
        "ref_log_probs": reference(obs).log_prob(actions),
    }


def update(policy, optimizer, batch: dict, args: Args) -> list[dict]:
    """μ passes over the batch, cut short by --target-kl; returns the minibatches' metrics."""
    updates = []
    parameters = list(policy.parameters())
    num_steps = min(all_gather(len(batch["obs"])))  # all processes take as many gradient steps
    num_minibatches = max(1, round(num_steps / args.minibatch_size))
    for _ in range(args.update_epochs):  # line 10
        order = torch.randperm(len(batch["obs"])).to(batch["obs"].device)
        for indices in order.tensor_split(num_minibatches):
            minibatch = {name: x[indices] for name, x in batch.items()}
            loss, metrics = grpo_loss(policy, minibatch, args)
            optimizer.zero_grad()
            loss.backward()
            approx_kl = metrics["losses/approx_kl"]
            all_reduce_mean([*(p.grad for p in parameters), approx_kl])  # in place
            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or torch.inf)
            updates.append(metrics | {"losses/grad_norm": grad_norm})
            if 0 < args.target_kl < approx_kl:  # already far from π_old
                return updates
            optimizer.step()  # line 11
    return updates


def train(args: Args, advantages_of=advantages_of, policy_type=Policy) -> "Run":
    """Algorithm 1 of the paper, its lines named in the comments.

    advantages_of(episodes, args) gives advantages [K, G, T]; checkpoints keep its state_dict, if it
    has one. policy_type: Policy, or a subclass with a network of its own.
    """
    check_args(args)
    device = start_device(args)
    set_seeds(args.seed)
    envs = [make_env(args) for _ in range(args.num_groups * args.group_size)]
    policy = policy_type(envs[0].observation_space, envs[0].action_space, args).to(device)  # line 1
    reference = deepcopy(policy)  # π_ref (line 3, if M is 0), as policy is π_θ
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
    saved = {"policy": policy, "reference": reference, "optimizer": optimizer}
    if hasattr(advantages_of, "state_dict"):
        saved["advantages_of"] = advantages_of
    run = Run(args, saved)  # with --resume it loads them

    while run.step < args.total_timesteps:  # lines 2 and 4
        set_seeds(args.seed, RANK, run.iteration + 1)  # so that a resumed run draws the same
        if args.ref_update_interval and run.iteration % args.ref_update_interval == 0:
            reference.load_state_dict(policy.state_dict())  # line 3: π_ref ← π_θ
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        # Lines 5 to 8. π_old (line 6) is π_θ until update; the batch keeps its log-probabilities.
        episodes = collect_groups(envs, policy, args)
        advantages = advantages_of(episodes, args)  # line 9
        batch = make_batch(episodes, advantages, policy, reference, args)
        updates = update(policy, optimizer, batch, args)  # lines 10 and 11
        if args.norm_obs:  # only now, so that π_old and π_θ normalize alike
            policy.update_obs_stats(torch.cat(all_gather(episodes.obs)).to(device))
        episode_returns = episodes.rewards.sum(-1)  # [K, G]
        metrics = {
            "charts/episodic_return": episode_returns.mean(),
            "charts/episodic_length": episodes.mask.sum(-1).double().mean(),
            "group/zero_std_frac": (advantages == 0).flatten(1).all(1).double().mean(),
            "group/return_std": episode_returns.std(-1).mean(),
        }
        metrics |= success_rate(episodes.infos)
        run.record(len(episodes.obs), episode_returns.flatten().tolist(), updates, metrics)

    run.finish(envs)
    return run


# --- The program, the same in every script: environments and evaluation ---


class UserError(ValueError):
    """What the user can put right: main prints the sentence and exits with status 2."""


def make_env(args: Args, **options) -> gym.Env:
    """An environment with flat observations and an end: after 1000 steps if it has no limit."""
    try:
        options |= json.loads(args.env_kwargs)
    except (ValueError, TypeError) as error:
        raise UserError(f"--env-kwargs must be like '{{\"size\": 8}}': {error}") from error
    try:
        env = gym.make(args.env_id, **options)
    except gym.error.Error as error:
        raise UserError(str(error)) from error
    except TypeError as error:
        if re.search("(keyword|positional|only) argument", str(error)):
            raise UserError(f"--env-kwargs: {error}") from error
        raise  # a mistake in the environment's constructor
    if (mode := options.get("render_mode")) and mode not in env.metadata.get("render_modes", []):
        raise UserError(f"{args.env_id} has no render mode {mode}.")
    if not isinstance(env.observation_space, spaces.Box) or len(env.observation_space.shape) != 1:
        with suppress(NotImplementedError):  # a space of the environment's own: refused below
            env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, spaces.Box):
        raise UserError(f"Cannot flatten {env.observation_space}: wrap the environment.")
    if env.spec.max_episode_steps is None:
        gym.logger.warn("Beyond 1000 steps episodes are cut (max_episode_steps in --env-kwargs).")
        env = gym.wrappers.TimeLimit(env, 1000)
    return env


def make_eval_envs(args: Args, folder: Path) -> list[gym.Env]:
    """The environments of evaluations: with --render or --capture-video a single one."""
    if args.render:
        return [make_env(args, render_mode="human")]
    if args.capture_video:
        env = gym.wrappers.RecordVideo(
            make_env(args, render_mode="rgb_array"),
            str(folder / "videos"),
            episode_trigger=lambda episode: episode % args.eval_episodes == 0,
            name_prefix=f"{datetime.now():%Y%m%d-%H%M%S}",
        )
        return [env]
    return [make_env(args) for _ in range(min(16, args.eval_episodes))]


def evaluate(policy: Policy, envs: list[gym.Env], args: Args) -> np.ndarray:
    """The returns of --eval-episodes episodes, from the same start states in every run."""
    starts = range(10**9, 10**9 + args.eval_episodes)  # seeds
    set_seeds(starts[0])
    returns = np.zeros(args.eval_episodes)
    infos = {}  # the last one of each episode
    for first in tqdm(range(0, len(starts), len(envs)), desc="Evaluating", leave=False, delay=1):
        seeds = starts[first : first + len(envs)]
        for i, _, _, reward, _, info in play(envs, policy, seeds, args.greedy):
            returns[first + i] += reward
            infos[first + i] = dict(info)
    kind = "Greedy" if args.greedy else "Sampled"
    result = f"return {returns.mean():.2f} ± {returns.std():.2f}"
    for rate in success_rate(infos.values()).values():
        result += f", success rate {rate:.2f}"
    tqdm.write(f"{kind} evaluation, {len(returns)} episodes: {result}")
    return returns


def success_rate(infos) -> dict:
    """The share of episodes whose last info says is_success, where there is such an entry."""
    successes = [info["is_success"] for info in infos if "is_success" in info]
    return {"charts/success_rate": np.mean(successes)} if successes else {}


def set_seeds(*numbers: int) -> None:
    """Seed torch, NumPy and Python's random (which some environments draw from) with numbers."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# --- Processes ---

TORCHRUN = dist.is_torchelastic_launched()
RANK = int(os.environ["RANK"]) if TORCHRUN else 0  # this process's number
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 1  # and how many there are


def start_device(args: Args) -> torch.device:
    """The CPU or, with --cuda, a GPU for each process; joins torchrun's processes."""
    torch.set_num_threads(1)  # more slow small networks down
    if TORCHRUN:
        dist.init_process_group(timeout=timedelta(days=1))  # while the first one evaluates
    cuda = args.cuda and torch.cuda.is_available()
    if args.cuda and not cuda:
        print(f"WARNING: torch {torch.__version__} finds no GPU: --cuda trains on the CPU")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if TORCHRUN else 0)
    print("Device:", torch.cuda.get_device_name() if cuda else "CPU")
    return torch.device("cuda" if cuda else "cpu")


def all_reduce_mean(tensors: list[Tensor]) -> None:
    """Under torchrun replace tensors, in place, by their mean over the processes."""
    if TORCHRUN:
        vector = nn.utils.parameters_to_vector(tensors)  # one message for all
        dist.all_reduce(vector)
        nn.utils.vector_to_parameters(vector / WORLD_SIZE, tensors)


def all_gather(x) -> list:
    """What each of torchrun's processes has for x."""
    gathered = [x] * WORLD_SIZE
    if TORCHRUN:
        dist.all_gather_object(gathered, x)
    return gathered


# --- Logs and files ---


class Run:
    """A run's progress, and its files. Under torchrun only the first process logs and writes."""

    PROGRESS = ["iteration", "step", "seconds", "recent_returns", "train_return", "best_return"]
    stopped = "Stopped."  # what Ctrl-C prints; with the command to resume, once there is a file

    def __init__(self, args: Args, saved: dict):
        self.args = args
        self.saved = saved  # what a file keeps beside options and progress
        self.iteration = 0
        self.step = 0  # environment steps
        self.seconds = 0.0
        self.recent_returns = []  # of this process's last 100 training episodes
        self.train_return = math.nan  # their mean
        self.best_return = -math.inf  # the best mean of an evaluation
        self.history = []  # the metrics of each iteration, since the start or the resume
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.dir = Path("runs", re.sub("[/:]", "-", name))
        if args.resume:
            path = Path(args.resume)
            options, progress = load(path, saved)
            vars(self).update(progress)
            if path.name == "checkpoint.pt":  # from best.pt on, a run has a folder of its own
                self.dir = path.parent
            if self.step >= args.total_timesteps < options["total_timesteps"]:
                raise UserError(f"{path} has {self.step:,} steps already.")
        self.started = time.perf_counter() - self.seconds
        self.saved_at = -math.inf  # seconds at the last checkpoint
        self.first_step = self.step + 1  # what a killed run logged from here on is dropped
        shown = {"unit": " steps", "unit_scale": True, "mininterval": 1, "disable": RANK > 0}
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, **shown)
        self.eval_envs = make_eval_envs(args, self.dir) if RANK == 0 else []
        script = shlex.quote(sys.argv[0])
        path = shlex.quote((self.dir / "checkpoint.pt").as_posix())
        launch = f"torchrun --nproc-per-node={WORLD_SIZE}" if TORCHRUN else "python"
        self.resume_command = f"{launch} {script} --resume {path}"
        self.watch_command = f"python {script} --evaluate {path} --render"
        if RANK == 0:
            tqdm.write(f"To resume: {self.resume_command}")

    def __repr__(self) -> str:
        return f"Run({self.dir}: {self.step:,} steps, return {self.train_return:.2f})"

    @cached_property
    def writer(self) -> SummaryWriter:
        """TensorBoard's log, and W&B's; opened when first needed: a refused run leaves no file."""
        options = asdict(self.args)
        if self.args.track:
            import wandb

            wandb.finish()  # the run before, in a notebook
            name = self.dir.resolve().name
            wandb.init(id=name, name=name, resume="allow", config=options, sync_tensorboard=True)
        writer = SummaryWriter(self.dir, purge_step=self.first_step)
        rows = "".join(f"\n|{name}|{value}|" for name, value in options.items())
        writer.add_text("options", f"|option|value|\n|-|-|{rows}", self.first_step)
        return writer

    def record(self, num_steps: int, returns: list[float], updates: list[dict], metrics: dict):
        """Count and log an iteration, with the means of its updates; evaluate and save if due."""
        num_steps = sum(all_gather(num_steps))
        self.iteration += 1
        self.step += num_steps
        self.seconds = time.perf_counter() - self.started
        self.recent_returns = (self.recent_returns + returns)[-100:]
        self.train_return = np.mean(self.recent_returns or [np.nan]).item()
        for name in updates[0]:
            metrics[name] = torch.stack([m[name] for m in updates]).mean()
        if not math.isfinite(metrics["losses/policy_loss"] + metrics["losses/grad_norm"]):
            raise UserError("The update is NaN or infinite: lower --learning-rate, scale rewards.")
        metrics["charts/SPS"] = self.step / self.seconds
        metrics["charts/learning_rate"] = self.saved["optimizer"].param_groups[0]["lr"]
        metrics = {name: float(value) for name, value in metrics.items()}
        self.history.append({"step": self.step} | metrics)
        if RANK > 0:
            return
        if self.iteration == 1 and metrics.get("group/zero_std_frac") == 1:
            tqdm.write("All advantages are 0 so far: every group ties, and ties teach nothing.")
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, self.step)
        self.bar.set_postfix_str(f"return={self.train_return:.1f}", refresh=False)
        self.bar.update(num_steps)
        if self.args.eval_interval and self.iteration % self.args.eval_interval == 0:
            self.evaluate()
        if self.seconds - self.saved_at >= self.args.checkpoint_interval:
            self.save("checkpoint.pt")

    def evaluate(self) -> None:
        """Evaluate the policy; keep it as best.pt if it is the best so far."""
        mean_return = evaluate(self.saved["policy"], self.eval_envs, self.args).mean().item()
        self.writer.add_scalar("eval/episodic_return", mean_return, self.step)
        if mean_return > self.best_return:
            self.best_return = mean_return
            self.save("best.pt")
            self.saved_at = -math.inf  # a checkpoint that knows of it follows at once

    def save(self, filename: str) -> None:
        """Write a file whole or not at all; options that are NumPy's numbers become plain ones."""
        self.writer.flush()  # first the curves up to here; it makes the folder, too
        states = {name: part.state_dict() for name, part in self.saved.items()}
        states["args"] = json.loads(json.dumps(asdict(self.args), default=np.generic.item))
        states["progress"] = {name: getattr(self, name) for name in self.PROGRESS}
        torch.save(states, self.dir / f"{filename}.part")
        os.replace(self.dir / f"{filename}.part", self.dir / filename)
        Run.stopped = f"Stopped. To resume: {self.resume_command}"
        self.saved_at = self.seconds

    def finish(self, envs: list[gym.Env]) -> None:
        """Save, report, evaluate, and close the environments."""
        if TORCHRUN:
            dist.destroy_process_group()
        if RANK == 0:
            self.save("checkpoint.pt")  # before anything is printed: the terminal may be gone
            self.bar.close()
            rate = f"{self.step / self.seconds:,.0f} steps/s"
            print(f"Trained {self.step:,} steps in {self.seconds:.1f} s ({rate})")
            count = len(self.recent_returns)
            print(f"Training return, last {count} episodes: {self.train_return:.2f}")
            self.evaluate()
            self.save("checkpoint.pt")
            self.writer.close()
            print(f"Logs:  tensorboard --logdir {shlex.quote(str(self.dir.parent))}")
            print(f"Watch: {self.watch_command}")
        for env in envs + self.eval_envs:
            with suppress(Exception):  # all is saved
                env.close()  # which finishes a video


def load(path: str | Path, parts: dict) -> tuple[dict, dict]:
    """Load into parts what Run.save wrote, and return its options and progress. Or UserError."""
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)  # which runs no code
        for name, part in parts.items():
            part.load_state_dict(states[name])
        return states["args"], states["progress"]
    except Exception as error:  # torch.load alone raises half a dozen kinds
        raise UserError(f"Cannot use {path}: {type(error).__name__}: {error}") from error


def saved_args(path: str | Path, args_type: type = Args, **changes) -> Args:
    """What train takes to go on from a saved file: its options that args_type has, and changes."""
    options, _ = load(path, {})
    args = args_type(**{f.name: options[f.name] for f in fields(args_type) if f.name in options})
    return replace(args, **{"resume": str(path), "evaluate": None} | changes)


def load_policy(path: str | Path, env: gym.Env, args: Args, policy_type=Policy) -> Policy:
    """The policy of a saved file, on the CPU, for environments like env (by make_env)."""
    policy = policy_type(env.observation_space, env.action_space, args)
    load(path, {"policy": policy})
    return policy


# --- The command line ---


def check_args(args: Args) -> None:
    """UserError if an option is out of range."""
    lowest = {"seed": 0, "ref_update_interval": 0, "eval_interval": 0}
    lowest |= {"group_size": 2, "log_std_init": -20}
    for field in fields(args):
        value = getattr(args, field.name)
        low = lowest.get(field.name, 1 if field.type is int else 0)
        high = 1 if field.name in ("gamma", "gae_lambda") else math.inf
        if isinstance(value, int | float) and not low <= value <= high:  # NaN fails, too
            option = f"--{field.name.replace('_', '-')}"
            raise UserError(f"{option} must be from {low} to {high}, not {value}.")


def play_saved(args: Args, policy_type=Policy) -> None:
    """Evaluate the policy of the file args.evaluate."""
    check_args(args)
    device = start_device(args)
    envs = make_eval_envs(args, Path(args.evaluate).parent)
    policy = load_policy(args.evaluate, envs[0], args, policy_type)
    evaluate(policy.to(device), envs, args)
    for env in envs:
        env.close()  # which finishes a video


def main(args_type: type = Args, **plug_ins) -> None:
    """Train, with plug_ins as train takes them, or, with --evaluate, play a saved policy."""
    with suppress(AttributeError):  # a notebook's output has no encoding of its own
        sys.stdout.reconfigure(errors="replace", line_buffering=True)  # Windows prints no γ
    sys.path.append("")  # modules of --env-id may lie in the current folder
    try:
        args = tyro.cli(args_type)
        if path := args.evaluate or args.resume:  # options not given are the file's
            args = tyro.cli(args_type, default=saved_args(path, args_type))
        if args.evaluate:
            play_saved(args, plug_ins.get("policy_type", Policy))
        else:
            train(args, **plug_ins)
    except (UserError, ModuleNotFoundError) as error:
        tqdm.write(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        tqdm.write(Run.stopped)
        sys.exit(130)


if __name__ == "__main__":
    main()
