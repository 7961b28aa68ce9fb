"""GRPO with process supervision: PPO's objective, a group in place of a critic.

    python grpo_process.py --env-id Acrobot-v1
    python grpo_process.py --evaluate runs/<run>/model.pt --render

Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, section 4.1) samples a group of
G outputs to a question and compares each with the group's mean. Here a question is what
env.reset(seed=s) fixes, the start state and the environment's random draws, and an output is an
episode. The objective is Eq. 3 with the KL term of Eq. 4, averaged over K groups:

    1/G Σ_i 1/|o_i| Σ_t { min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - β D_KL },    ρ = π_θ(a|s) / π_old(a|s)
    D_KL = π_ref/π_θ - log(π_ref/π_θ) - 1

The advantage (section 4.1.3) sums a step's reward and those that follow, each normalized over the
group's steps; it is 0 where every step pays the same, as on CartPole:

    r̃_{i,t} = (r_{i,t} - mean(r)) / std(r),    Â_{i,t} = Σ_{j≥t} γ^(j-t) r̃_{i,j}

    paper   here                      paper   here
    G       --group-size              π_old   old_log_probs
    o_i     an episode (member)       π_ref   reference, renewed every M iterations
    |o_i|   its number of steps       ε, β    --clip-coef, --kl-coef
    ρ, Â    ratio, advantages         M, μ    --ref-update-interval, --update-epochs

A step of Algorithm 1 is an iteration here. Departures: rewards are the environment's, so line 12 is
missing. By default there is no KL term (no policy is pretrained), the mean is over all steps
(--loss-agg trajectory: Eq. 3), μ passes go in minibatches and end early (--target-kl), gradients
are clipped, the learning rate falls, and γ < 1.
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
import sys
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain
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


@dataclass
class Args:
    """GRPO with process supervision."""

    env_id: str = "Acrobot-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    env_kwargs: str = "{}"  # for gym.make, as '{"is_slippery": false, "max_episode_steps": 50}'
    total_timesteps: int = 500_000  # environment steps; the iteration that reaches them is the last
    seed: int = 1  # fixes weights, start states and sampling

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
    ent_coef: float = 0.0  # weight of an entropy bonus (entropy in nats)
    max_grad_norm: float = 0.5  # L2 norm to which a network's gradient is clipped (0: it is not)
    target_kl: float = 0.05  # end an update once KL(π_old, π_θ) exceeds this, in nats (0: never)

    hidden_size: int = 64  # units in each of the two hidden layers
    log_std_init: float = 0.0  # log of the Gaussian's initial standard deviation (Box)
    norm_obs: bool = False  # observations to mean 0, std 1, within ±10 (iteration 1: only clipped)
    cuda: bool = False  # train on a GPU if there is one
    num_threads: int = 1  # torch's CPU threads

    eval_interval: int = 0  # iterations between evaluations (0: only after training)
    eval_episodes: int = 100  # episodes of an evaluation
    greedy: bool = True  # evaluate with the likeliest actions (off: sampled ones, as in training)
    render: bool = False  # show the episodes of evaluations in a window, one by one
    capture_video: bool = False  # film each evaluation's first episode to videos/ (not if --render)
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
    return discounted_sums(normalized.where(~tied, 0), gamma)


def discounted_sums(x: Tensor, gamma: float) -> Tensor:
    """Σ_{j≥t} γ^(j-t) x_j along the last dimension."""
    sums = x.clone()
    for t in reversed(range(x.shape[-1] - 1)):
        sums[..., t] += gamma * sums[..., t + 1]
    return sums


def step_weights(mask: Tensor, loss_agg: str) -> Tensor:
    """Weights [K, G, T] that turn the plain mean over all S steps into the mean of loss_agg.

    "trajectory": 1/(K G) Σ_i 1/|o_i| Σ_t x (Eq. 3). "step": 1/S Σ x (DAPO, over all K groups).
    """
    if loss_agg == "step":
        return mask.double()
    lengths = mask.sum(dim=-1, keepdim=True).double()  # |o_i|, [K, G, 1]
    return mask * lengths.sum() / (lengths.numel() * lengths)  # S / (K G |o_i|)


def grpo_loss(policy, batch: dict, clip_coef: float, kl_coef: float, ent_coef: float):
    """Minus (Eq. 3 + an entropy bonus) on a flat batch of B steps, and the metrics to log.

    batch: obs [B, D], actions [B, A], and [B] each: old_log_probs, ref_log_probs, advantages,
    weights (by step_weights). policy(obs) gives a distribution whose log_prob is [B].
    """
    distribution = policy(batch["obs"])
    log_probs = distribution.log_prob(batch["actions"])
    advantages = batch["advantages"]
    assert log_probs.shape == advantages.shape  # [B, B] would broadcast, silently
    weights = batch["weights"]

    # In an iteration's first gradient step ρ = 1, nothing is clipped: it is the policy gradient's.
    # The bound keeps exp finite. Under π_old, P(ρ > e^20) <= e^-20 (Markov's inequality).
    log_ratio = (log_probs - batch["old_log_probs"]).clamp(max=20)  # log π_θ/π_old
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantages, clipped_ratio * advantages)
    policy_loss = -(weights * surrogate).mean()  # Eq. 3: see step_weights

    ref_log_ratio = (batch["ref_log_probs"] - log_probs).clamp(max=20)  # log π_ref/π_θ
    kl = (weights * (ref_log_ratio.exp() - ref_log_ratio - 1)).mean()  # Eq. 4
    entropy = (weights * distribution.entropy()).mean()
    loss = policy_loss + kl_coef * kl - ent_coef * entropy
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
        options = num_options(action_space)  # of each of the A choices; [] for a Box
        self.continuous = not options
        if self.continuous:
            num_outputs = math.prod(action_space.shape)
            self.log_std = nn.Parameter(args.log_std_init * torch.ones(num_outputs))
        else:
            missing = torch.arange(max(options)) >= torch.tensor(options)[:, None]  # [A, C]
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
            obs = ((obs.double() - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10)
        return obs.float()

    def forward(self, obs: Tensor) -> Distribution:
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
        distribution = self(torch.from_numpy(obs).to(next(self.parameters()).device))
        actions = distribution.mode if greedy else distribution.sample()
        return actions.cpu().numpy()


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

    Yields every step as it is taken: the episode's number i, observation, action, reward, and
    whether a time limit cut the episode there. UserError for NaN and infinity.
    """
    running = {i: envs[i].reset(seed=seed)[0] for i, seed in enumerate(seeds)}
    while running:
        obs = np.array(list(running.values())).reshape(len(running), -1)
        if not np.isfinite(obs).all():
            raise UserError(f"NaN or infinity observed in an episode of seeds {set(seeds)}.")
        actions = policy.act(obs, greedy)
        env_actions = to_env(actions, envs[0].action_space)
        for row, i in enumerate(list(running)):
            running[i], reward, terminated, truncated, _ = envs[i].step(env_actions[row])
            number = np.float64(reward).item()  # some are arrays of one number
            if not math.isfinite(number):
                raise UserError(f"A reward is {reward}, in the episode of seed {seeds[i]}.")
            yield i, obs[row], actions[row], number, bool(truncated and not terminated)
            if terminated or truncated:
                del running[i]


class Episodes(NamedTuple):
    """K groups of G episodes: S steps in all, at most T in one episode."""

    obs: Tensor  # [S, D], by episode, then by time: the order of rewards[mask]
    actions: Tensor  # [S, A]
    rewards: Tensor  # [K, G, T] float64, 0 where there is no step
    mask: Tensor  # [K, G, T] bool, True where there is a step
    truncated: Tensor  # [K, G] bool, True where a time limit cut the episode: for advantages_of


def collect_groups(envs: list[gym.Env], policy: Policy, args: Args) -> Episodes:
    """Play an episode in each environment, again until the steps fill a minibatch.

    With --seed-groups a group starts from one reset seed; UserError if first observations differ.
    """
    episodes = []  # each a list of steps: observation, action, reward, cut by a time limit
    while sum(map(len, episodes)) < args.minibatch_size:
        num_seeds = args.num_groups if args.seed_groups else len(envs)
        seeds = torch.randint(2**31, (num_seeds,))  # line 5: the start states
        seeds = seeds.repeat_interleave(len(envs) // num_seeds).tolist()
        first = len(episodes)
        episodes += [[] for _ in envs]
        for i, *step in play(envs, policy, seeds):  # lines 7 and 8
            episodes[first + i].append(step)

    lengths = torch.tensor([len(episode) for episode in episodes]).view(-1, args.group_size, 1)
    mask = torch.arange(lengths.max()) < lengths
    starts = np.array([steps[0][0] for steps in episodes]).reshape(*mask.shape[:2], -1)  # [K, G, D]
    if args.seed_groups and (starts != starts[:, :1]).any():
        raise UserError(f"{args.env_id} ignores reset(seed): fix that, or use --no-seed-groups.")
    columns = zip(*chain(*episodes))  # by episode, then by time
    obs, actions, rewards, _ = (torch.from_numpy(np.array(column)) for column in columns)
    return Episodes(
        obs=obs,
        actions=actions,
        rewards=torch.zeros(mask.shape).double().masked_scatter(mask, rewards),
        mask=mask,
        truncated=torch.tensor([steps[-1][-1] for steps in episodes]).view(mask.shape[:2]),
    )


@torch.no_grad()
def make_batch(episodes: Episodes, advantages: Tensor, policy, reference, args: Args) -> dict:
    """The S steps of the episodes as grpo_loss takes them, on the policy's device."""
    device = next(policy.parameters()).device
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


def update(policy, optimizer, batch: dict, args: Args) -> dict[str, float]:
    """μ passes over the batch, cut short by --target-kl; returns the metrics' means."""
    history = []
    parameters = list(policy.parameters())
    num_steps = min(of_all_processes(len(batch["obs"])))  # all take as many gradient steps
    num_minibatches = max(1, round(num_steps / args.minibatch_size))
    for _ in range(args.update_epochs):  # line 10
        order = torch.randperm(len(batch["obs"])).to(batch["obs"].device)
        for indices in order.tensor_split(num_minibatches):
            minibatch = {name: x[indices] for name, x in batch.items()}
            loss, metrics = grpo_loss(
                policy, minibatch, args.clip_coef, args.kl_coef, args.ent_coef
            )
            optimizer.zero_grad()
            loss.backward()
            approx_kl = metrics["losses/approx_kl"]
            average_over_processes([*(p.grad for p in parameters), approx_kl])  # in place
            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or torch.inf)
            history.append(metrics | {"losses/grad_norm": grad_norm})
            if 0 < args.target_kl < approx_kl:  # already far from π_old
                return means(history)
            optimizer.step()  # line 11
    return means(history)


def train(args: Args, advantages_of=None) -> "Run":
    """Algorithm 1 of the paper, its lines named in the comments.

    advantages_of(episodes, args) gives advantages [K, G, T] in place of compute_advantages.
    """
    check_args(args)
    device = start_device(args)
    set_seeds(args.seed)
    envs = [make_env(args) for _ in range(args.num_groups * args.group_size)]
    policy = Policy(envs[0].observation_space, envs[0].action_space, args).to(device)  # line 1: π_θ
    reference = deepcopy(policy)  # π_ref (line 3, if M is 0)
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
    parts = {"policy": policy, "reference": reference, "optimizer": optimizer}
    if hasattr(advantages_of, "state_dict"):
        parts["advantages_of"] = advantages_of
    run = Run(args, envs, parts)  # with --resume it loads the parts

    while run.step < args.total_timesteps:  # lines 2 and 4
        set_seeds(args.seed, RANK, run.iteration + 1)  # so that a resumed run draws the same
        if args.ref_update_interval and run.iteration % args.ref_update_interval == 0:
            reference.load_state_dict(policy.state_dict())  # line 3: π_ref ← π_θ
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        # Lines 5 to 8. π_old (line 6) is π_θ until update; the batch keeps its log-probabilities.
        episodes = collect_groups(envs, policy, args)
        if advantages_of is None:
            advantages = compute_advantages(  # line 9
                episodes.rewards, episodes.mask, args.gamma, args.norm_std
            )
        else:
            advantages = advantages_of(episodes, args)
        batch = make_batch(episodes, advantages, policy, reference, args)
        metrics = update(policy, optimizer, batch, args)  # lines 10 and 11
        if args.norm_obs:  # only now, so that π_old and π_θ normalize alike
            update_obs_stats(policy, batch["obs"])
        episode_returns = episodes.rewards.sum(dim=-1)  # [K, G]
        metrics |= group_metrics(episodes, episode_returns, advantages)
        run.record(len(episodes.obs), episode_returns.flatten().tolist(), metrics)

    return run.finish()


# --- The program around the algorithm ---

RANK = int(os.environ.get("RANK", 0))  # this process's number under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # and how many there are
EVAL_SEED = 10**9  # all policies are evaluated from the same start states


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
    if env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 1000)
    if not isinstance(env.observation_space, spaces.Box) or len(env.observation_space.shape) != 1:
        with suppress(NotImplementedError):  # a space of the environment's own: refused below
            env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, spaces.Box):
        raise UserError(f"Cannot flatten {env.observation_space}: wrap the environment.")
    return env


def num_options(space: spaces.Space) -> list[int]:
    """How many options each of the A choices of an action has; none for a Box of floats."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.flatten().tolist()
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return []
    kinds = "Discrete, MultiDiscrete, MultiBinary or a Box of floats"
    raise UserError(f"Actions must be {kinds}, not {space}: wrap the environment.")


def to_env(actions: np.ndarray, space: spaces.Space) -> list:
    """Actions [B, A] as env.step takes them: Box ones scaled and clipped, choices plus start."""
    actions = actions.reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        bounded = space.high.astype(float) / 2 - space.low / 2 < 1e6  # others are not scaled
        low = np.where(bounded, space.low, -1)
        high = np.where(bounded, space.high, 1)
        actions = low + (high - low) * (actions + 1) / 2  # the policy's [-1, 1] is all of it
        actions = actions.clip(space.low, space.high)
    else:
        actions = actions + getattr(space, "start", 0)
    return list(actions.astype(space.dtype))


def set_seeds(*numbers: int) -> None:
    """Seed torch, NumPy and Python's random (which some environments draw from) with numbers."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def start_device(args: Args) -> torch.device:
    """The CPU or, with --cuda, a GPU for each process; joins torchrun's processes."""
    torch.set_num_threads(args.num_threads)
    if WORLD_SIZE > 1:
        dist.init_process_group(timeout=timedelta(days=1))  # while the first one evaluates
    cuda = args.cuda and torch.cuda.is_available()
    if args.cuda and not cuda:
        print(f"WARNING: torch {torch.__version__} finds no GPU: --cuda trains on the CPU")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    print("Device:", torch.cuda.get_device_name() if cuda else "CPU")
    return torch.device("cuda" if cuda else "cpu")


def average_over_processes(tensors: list[Tensor]) -> None:
    """Under torchrun replace tensors, in place, by their mean over the processes."""
    if WORLD_SIZE > 1:
        vector = nn.utils.parameters_to_vector(tensors)  # one message for all
        dist.all_reduce(vector)
        nn.utils.vector_to_parameters(vector / WORLD_SIZE, tensors)


def of_all_processes(number: int) -> list[int]:
    """The number that each of torchrun's processes has."""
    numbers = [number] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(numbers, number)
    return numbers


@torch.no_grad()
def update_obs_stats(policy: Policy, obs: Tensor) -> None:
    """Merge an iteration's observations [S, D] into the policy's statistics (Chan et al. 1979)."""
    obs = obs.double()
    count = torch.full_like(policy.obs_count, len(obs))
    total = obs.sum(dim=0)
    average_over_processes([count, total])
    mean = total / count
    squares = (obs - mean).square().sum(dim=0)
    average_over_processes([squares])

    weight = count / (policy.obs_count + count)
    delta = mean - policy.obs_mean
    policy.obs_var += weight * (squares / count - policy.obs_var + (1 - weight) * delta.square())
    policy.obs_mean += weight * delta
    policy.obs_count += count


def means(history: list[dict]) -> dict[str, float]:
    """The mean of each metric over the minibatches."""
    return {name: torch.stack([m[name] for m in history]).mean().item() for name in history[0]}


def group_metrics(episodes: Episodes, episode_returns: Tensor, advantages: Tensor) -> dict:
    """What is logged of an iteration's episodes; their returns are [K, G]."""
    tied = (advantages == 0).flatten(1).all(1)  # [K]
    return {
        "charts/episodic_return": episode_returns.mean(),
        "charts/episodic_length": episodes.mask.sum(dim=-1).double().mean(),
        "group/zero_std_frac": tied.double().mean(),
        "group/return_std": episode_returns.std(dim=-1).mean(),
    }


def evaluate(policy: Policy, envs: list[gym.Env], args: Args) -> np.ndarray:
    """The returns of --eval-episodes episodes, from the same start states in every run."""
    set_seeds(EVAL_SEED)
    returns = np.zeros(args.eval_episodes)
    starts = range(EVAL_SEED, EVAL_SEED + args.eval_episodes)
    for first in tqdm(range(0, len(starts), len(envs)), desc="Evaluating", leave=False, delay=1):
        seeds = starts[first : first + len(envs)]
        for i, _, _, reward, _ in play(envs, policy, seeds, args.greedy):
            returns[first + i] += reward
    kind = "Greedy" if args.greedy else "Sampled"
    mean = f"{returns.mean():.2f} ± {returns.std():.2f}"
    tqdm.write(f"{kind} evaluation, {len(returns)} episodes: return {mean}")
    return returns


def shown_envs(args: Args, folder: Path) -> list[gym.Env]:
    """With --render or --capture-video the one environment of evaluations, else none."""
    if not (args.render or args.capture_video):
        return []
    env = make_env(args, render_mode="human" if args.render else "rgb_array")
    if not args.render:
        env = gym.wrappers.RecordVideo(
            env,
            str(folder / "videos"),
            episode_trigger=lambda episode: episode % args.eval_episodes == 0,
            name_prefix=f"{datetime.now():%Y%m%d-%H%M%S}",
        )
    return [env]


class Run:
    """A run's progress, logs and files. Of torchrun's processes only the first logs and writes."""

    PROGRESS = ["iteration", "step", "seconds", "recent_returns", "best_return"]

    def __init__(self, args: Args, envs: list[gym.Env], parts: dict):
        self.args = args
        self.parts = parts  # what a checkpoint keeps beside the progress
        self.iteration = 0
        self.step = 0  # environment steps
        self.seconds = 0.0
        self.recent_returns = []  # of this process's last 100 training episodes
        self.best_return = -np.inf  # the best mean of an evaluation
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        name = f"{args.env_id}__{Path(sys.argv[0]).stem}__{args.seed}__{now}"
        self.dir = Path("runs", name.replace("/", "-").replace(":", "-"))
        if args.resume:
            path = Path(args.resume)
            saved_args, progress = load(path, parts)
            vars(self).update(progress)
            if path.name == "checkpoint.pt":  # from best.pt on, a run has a folder of its own
                self.dir = path.parent
            if self.step >= args.total_timesteps < saved_args["total_timesteps"]:
                raise UserError(f"{path} has {self.step:,} steps already.")
        self.first_step = self.step + 1  # what a killed run logged from here on is dropped
        self.started = time.perf_counter() - self.seconds
        shown = {"unit": " steps", "unit_scale": True, "mininterval": 1, "disable": RANK > 0}
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, **shown)
        if RANK == 0:
            self.eval_envs = shown_envs(args, self.dir) or envs
            self.saved_at = -np.inf  # self.seconds at the last checkpoint
            launch = f"torchrun --nproc-per-node={WORLD_SIZE}" if WORLD_SIZE > 1 else "python"
            tqdm.write(f"To resume: {launch} {sys.argv[0]} --resume {self.dir / 'checkpoint.pt'}")

    @cached_property
    def writer(self) -> SummaryWriter:
        """TensorBoard's log, and W&B's; opened when first needed: a refused run leaves no file."""
        options = asdict(self.args)
        if self.args.track:
            import wandb

            name = self.dir.resolve().name
            wandb.init(id=name, name=name, resume="allow", config=options, sync_tensorboard=True)
        writer = SummaryWriter(self.dir, purge_step=self.first_step)
        rows = "".join(f"\n|{name}|{value}|" for name, value in options.items())
        writer.add_text("options", f"|option|value|\n|-|-|{rows}", self.step)
        return writer

    def record(self, num_steps: int, returns: list[float], metrics: dict) -> None:
        """Count, log and show an iteration; evaluate and save if due."""
        num_steps = sum(of_all_processes(num_steps))
        self.iteration += 1
        self.step += num_steps
        self.seconds = time.perf_counter() - self.started
        self.recent_returns = (self.recent_returns + returns)[-100:]
        if not math.isfinite(metrics["losses/policy_loss"] + metrics["losses/grad_norm"]):
            raise UserError("The update is NaN or infinite: lower --learning-rate, scale rewards.")
        if RANK > 0:
            return
        if self.iteration == 1 and metrics["group/zero_std_frac"] == 1:
            tqdm.write("All advantages are 0 so far: every group ties, and ties teach nothing.")
        metrics["charts/SPS"] = self.step / self.seconds
        metrics["charts/learning_rate"] = self.parts["optimizer"].param_groups[0]["lr"]
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, self.step)
        mean_return = np.mean(self.recent_returns or [np.nan])
        self.bar.set_postfix_str(f"return={mean_return:.1f}", refresh=False)
        self.bar.update(num_steps)
        if self.args.eval_interval and self.iteration % self.args.eval_interval == 0:
            self.evaluate()
        if self.seconds - self.saved_at >= self.args.checkpoint_interval:
            self.saved_at = self.seconds
            self.save("checkpoint.pt")

    def evaluate(self) -> None:
        """Evaluate the policy; keep it as best.pt if it is the best so far."""
        mean_return = float(evaluate(self.parts["policy"], self.eval_envs, self.args).mean())
        self.writer.add_scalar("eval/episodic_return", mean_return, self.step)
        if mean_return > self.best_return:
            self.best_return = mean_return
            self.save("best.pt")

    def save(self, filename: str) -> None:
        """Write a file whole or not at all: a kill leaves the one before."""
        self.writer.flush()  # first the curves up to here; it makes the folder, too
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["args"] = asdict(self.args)
        state["progress"] = {name: getattr(self, name) for name in self.PROGRESS}
        part = self.dir / f"{filename}.part"
        torch.save(state, part)
        part.replace(self.dir / filename)

    def finish(self) -> "Run":
        """Save, evaluate and report."""
        self.bar.close()
        if WORLD_SIZE > 1:
            dist.destroy_process_group()
        if RANK == 0:
            rate = f"{self.step / self.seconds:,.0f} steps/s"
            print(f"Trained {self.step:,} steps in {self.seconds:.1f} s ({rate})")
            mean_return = np.mean(self.recent_returns or [np.nan])
            print(f"Training return, last {len(self.recent_returns)} episodes: {mean_return:.2f}")
            self.save("model.pt")
            self.evaluate()
            self.save("checkpoint.pt")
            self.writer.close()
            print(f"Logs:  tensorboard --logdir {self.dir.parent}")
            print(f"Watch: python {sys.argv[0]} --evaluate {self.dir / 'model.pt'} --render")
            if self.args.capture_video:
                self.eval_envs[0].close()  # which finishes the video
        return self


def load(path: str | Path, parts: dict) -> tuple[dict, dict]:
    """Load into parts what Run.save wrote, and return its options and progress. Or UserError."""
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)  # which runs no code
        for name, part in parts.items():
            part.load_state_dict(states[name])
        return states["args"], states["progress"]
    except Exception as error:  # torch.load alone raises half a dozen kinds
        raise UserError(f"Cannot use {path}: {type(error).__name__}: {error}") from error


def check_args(args: Args) -> None:
    """UserError if an option is out of range."""
    lowest = {"seed": 0, "ref_update_interval": 0, "eval_interval": 0}
    lowest |= {"group_size": 2, "log_std_init": -20}
    for field in fields(args):
        value = getattr(args, field.name)
        low = lowest.get(field.name, 1 if field.type is int else 0)
        high = 1 if field.name in ("gamma", "gae_lambda") else 2**40
        if isinstance(value, int | float) and not low <= value <= high:  # NaN fails, too
            option = field.name.replace("_", "-")
            raise UserError(f"--{option} must be from {low} to {high}, not {value}.")


def play_saved(args: Args) -> None:
    """Evaluate the policy of the file args.evaluate."""
    check_args(args)
    device = start_device(args)
    num_envs = args.num_groups * args.group_size
    envs = shown_envs(args, Path(args.evaluate).parent) or [make_env(args) for _ in range(num_envs)]
    policy = Policy(envs[0].observation_space, envs[0].action_space, args)
    load(args.evaluate, {"policy": policy})
    evaluate(policy.to(device), envs, args)
    if args.capture_video:
        envs[0].close()  # which finishes the video


def main(args_type: type = Args, advantages_of=None) -> None:
    """Train or, with --evaluate, play a saved policy."""
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # Windows' γ; a killed run's log
    sys.path.append("")  # modules of --env-id may lie in the current folder
    try:
        args = tyro.cli(args_type)
        if path := args.evaluate or args.resume:  # options not given are the file's
            saved_args, _ = load(path, {})
            known = {name: saved_args[name] for name in asdict(args) if name in saved_args}
            args = tyro.cli(args_type, default=args_type(**known))
        if args.evaluate:
            play_saved(args)
        else:
            train(args, advantages_of)
    except (UserError, ModuleNotFoundError) as error:
        tqdm.write(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
