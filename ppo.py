"""PPO for Gymnasium: the baseline, with a critic, that GRPO is compared with.

    python ppo.py --env-id CartPole-v1
    python ppo.py --evaluate runs/<run>/model.pt --render

Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) with Generalized Advantage
Estimation (GAE, arXiv:1506.02438). The objective (Eq. 9), a mean over N environments times T steps:

    min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - ½ c1 (V(s) - V_target)² + c2 entropy,    ρ = π_θ/π_old

    δ_t = r_t + γ V(s_{t+1}) (1 - terminated_t) - V(s_t)
    Â_t = δ_t + γ λ (1 - done_t) Â_{t+1},    V_target = Â + V

A terminated episode has no future value. A truncated one has: its last step bootstraps from the
value of the observation it led to, not of the next episode's first one.

    paper   here                      paper   here
    N, T    --num-envs, --num-steps   ε       --clip-coef
    γ, λ    --gamma, --gae-lambda     c1, c2  --vf-coef, --ent-coef
    ρ, Â    ratio, advantages         K       --update-epochs

Beyond Algorithm 1: the ½ (the paper and SB3 have none), normalized advantages (here over the
whole batch), early stopping by KL, clipped gradients (here each network's by itself), a falling
learning rate, orthogonal weights. What the GRPO scripts share with it is word for word the same.
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
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

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
    """PPO."""

    env_id: str = "CartPole-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    env_kwargs: str = "{}"  # for gym.make, as '{"is_slippery": false, "max_episode_steps": 50}'
    total_timesteps: int = 200_000  # environment steps; the iteration that reaches them is the last
    seed: int = 1  # fixes weights, start states and sampling

    num_envs: int = 16  # N: environments stepped side by side (under torchrun, by each process)
    num_steps: int = 256  # T: steps per environment and iteration
    gamma: float = 0.99  # γ: discount per step
    gae_lambda: float = 0.98  # λ: GAE's trade of bias (0) against variance (1)
    norm_adv: bool = True  # normalize the advantages of an iteration

    update_epochs: int = 10  # K: passes over an iteration's steps
    minibatch_size: int = 128  # about how many steps a gradient step sees
    learning_rate: float = 1e-3  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall linearly to 0
    clip_coef: float = 0.2  # ε: the ratio is clipped to [1-ε, 1+ε]
    ent_coef: float = 0.0  # c2: weight of an entropy bonus (entropy in nats)
    vf_coef: float = 0.5  # c1: weight of the value loss
    max_grad_norm: float = 0.5  # L2 norm to which a network's gradient is clipped (0: it is not)
    target_kl: float = 0.1  # end an update once KL(π_old, π_θ) exceeds this, in nats (0: never)

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


def compute_gae(rewards, values, next_values, terminated, done, gamma: float, gae_lambda: float):
    """Advantages and returns [T, N] by GAE(λ) (arXiv:1506.02438, Eq. 16), from [T, N] each.

    next_values[t] is V of the observation that step t led to, before any reset; done is terminated
    or truncated. The returns are the critic's targets, Â + V.
    """
    deltas = rewards + gamma * next_values.where(~terminated, 0) - values
    advantages = torch.zeros_like(deltas)
    later = torch.zeros_like(deltas[0])  # Â_{t+1}
    for t in reversed(range(len(deltas))):
        later = deltas[t] + gamma * gae_lambda * later.where(~done[t], 0)
        advantages[t] = later
    return advantages, advantages + values


def ppo_loss(policy, batch: dict, clip_coef: float, ent_coef: float, vf_coef: float):
    """Minus PPO's objective (Eq. 9) on a flat batch of B steps, and the metrics to log.

    batch: obs [B, D], actions [B, A], and [B] each: old_log_probs, advantages, returns.
    """
    distribution = policy(batch["obs"])
    log_probs = distribution.log_prob(batch["actions"])
    advantages = batch["advantages"]
    assert log_probs.shape == advantages.shape  # [B, B] would broadcast, silently

    # In an iteration's first gradient step ρ = 1, nothing is clipped: it is the policy gradient's.
    # The bound keeps exp finite. Under π_old, P(ρ > e^20) <= e^-20 (Markov's inequality).
    log_ratio = (log_probs - batch["old_log_probs"]).clamp(max=20)  # log π_θ/π_old
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantages, clipped_ratio * advantages)
    policy_loss = -surrogate.mean()

    value_loss = 0.5 * (policy.value(batch["obs"]) - batch["returns"]).square().mean()
    entropy = distribution.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    metrics = {
        "losses/policy_loss": policy_loss.detach(),
        "losses/value_loss": value_loss.detach(),
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


class ActorCritic(Policy):
    """A policy and, as a network of its own, a value function V."""

    def __init__(self, obs_space: spaces.Box, action_space: spaces.Space, args: Args):
        super().__init__(obs_space, action_space, args)
        self.critic = mlp(obs_space.shape[0], args.hidden_size, 1, output_gain=1.0)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [B] for obs [B, D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)


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


class Steps(NamedTuple):
    """T steps of each of N environments, and the episodes that ended among them."""

    obs: Tensor  # [T, N, D]
    actions: Tensor  # [T, N, A]
    rewards: Tensor  # [T, N] float64
    next_obs: Tensor  # [T, N, D] what each step led to, before any reset
    terminated: Tensor  # [T, N] bool
    done: Tensor  # [T, N] bool, terminated or truncated
    episode_returns: list[float]  # of the episodes that ended
    episode_lengths: list[int]


@dataclass
class InFlight:
    """An environment and the episode in it, which goes on from one iteration to the next."""

    env: gym.Env
    seed: int
    obs: np.ndarray  # the present one
    return_so_far: float = 0.0
    length: int = 0


def start_episode(env: gym.Env) -> InFlight:
    """Reset an environment with a seed of its own."""
    seed = torch.randint(2**31, ()).item()
    obs, _ = env.reset(seed=seed)
    return InFlight(env, seed, np.array(obs).ravel())


def collect_steps(in_flight: list[InFlight], policy: Policy, num_steps: int) -> Steps:
    """Sample num_steps steps in every environment. UserError for NaN and infinity."""
    action_space = in_flight[0].env.action_space
    rows = []  # by time, then by environment
    episode_returns = []
    episode_lengths = []
    for _ in range(num_steps):
        obs = np.array([episode.obs for episode in in_flight])
        if not np.isfinite(obs).all():
            seeds = [episode.seed for episode in in_flight]
            raise UserError(f"NaN or infinity observed in an episode of seeds {seeds}.")
        actions = policy.act(obs)
        env_actions = to_env(actions, action_space)
        for n, episode in enumerate(in_flight):
            next_obs, reward, terminated, truncated, _ = episode.env.step(env_actions[n])
            number = np.float64(reward).item()  # some are arrays of one number
            if not math.isfinite(number):
                raise UserError(f"A reward is {reward}, in the episode of seed {episode.seed}.")
            done = bool(terminated or truncated)
            episode.obs = np.array(next_obs).ravel()  # a copy
            episode.return_so_far += number
            episode.length += 1
            rows.append((obs[n], actions[n], number, episode.obs, bool(terminated), done))
            if done:
                episode_returns.append(episode.return_so_far)
                episode_lengths.append(episode.length)
                in_flight[n] = start_episode(episode.env)
    columns = [torch.from_numpy(np.array(column)) for column in zip(*rows)]
    blocks = [column.unflatten(0, (num_steps, len(in_flight))) for column in columns]
    steps = Steps(*blocks, episode_returns, episode_lengths)
    if not steps.next_obs.isfinite().all():
        raise UserError("NaN or infinity observed at the end of an episode or iteration.")
    return steps


@torch.no_grad()
def make_batch(steps: Steps, policy: ActorCritic, args: Args) -> dict:
    """The S = T·N steps as ppo_loss takes them, flat on the policy's device."""
    device = next(policy.parameters()).device
    obs = steps.obs.flatten(0, 1).to(device)
    next_obs = steps.next_obs.flatten(0, 1).to(device)
    actions = steps.actions.flatten(0, 1).to(device)
    advantages, returns = compute_gae(
        steps.rewards,
        values=policy.value(obs).cpu().double().view(steps.rewards.shape),
        next_values=policy.value(next_obs).cpu().double().view(steps.rewards.shape),
        terminated=steps.terminated,
        done=steps.done,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
    )
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    return {
        "obs": obs,
        "actions": actions,
        "advantages": advantages.flatten().float().to(device),
        "returns": returns.flatten().float().to(device),
        "old_log_probs": policy(obs).log_prob(actions),  # until update, policy is π_old
    }


def update(policy, optimizer, batch: dict, args: Args) -> dict[str, float]:
    """Passes over the batch, cut short by --target-kl; returns the metrics' means."""
    history = []
    critic = list(policy.critic.parameters())
    actor = [p for name, p in policy.named_parameters() if not name.startswith("critic.")]
    num_steps = min(of_all_processes(len(batch["obs"])))  # all take as many gradient steps
    num_minibatches = max(1, round(num_steps / args.minibatch_size))
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"])).to(batch["obs"].device)
        for indices in order.tensor_split(num_minibatches):
            minibatch = {name: x[indices] for name, x in batch.items()}
            loss, metrics = ppo_loss(policy, minibatch, args.clip_coef, args.ent_coef, args.vf_coef)
            optimizer.zero_grad()
            loss.backward()
            approx_kl = metrics["losses/approx_kl"]
            average_over_processes([*(p.grad for p in actor + critic), approx_kl])  # in place
            max_norm = args.max_grad_norm or torch.inf
            nn.utils.clip_grad_norm_(critic, max_norm)  # by itself, for it grows with the returns
            grad_norm = nn.utils.clip_grad_norm_(actor, max_norm)
            history.append(metrics | {"losses/grad_norm": grad_norm})
            if 0 < args.target_kl < approx_kl:  # already far from π_old
                return means(history)
            optimizer.step()
    return means(history)


def train(args: Args) -> "Run":
    """Algorithm 1 of the paper."""
    check_args(args)
    device = start_device(args)
    set_seeds(args.seed)
    envs = [make_env(args) for _ in range(args.num_envs)]
    policy = ActorCritic(envs[0].observation_space, envs[0].action_space, args).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
    eval_envs = [make_env(args) for _ in range(args.num_envs)]  # training goes on in the others
    parts = {"policy": policy, "optimizer": optimizer}
    run = Run(args, eval_envs, parts)  # with --resume it loads the parts
    set_seeds(args.seed, RANK, run.iteration, 1)  # other starts in each process, and when resumed
    in_flight = [start_episode(env) for env in envs]

    while run.step < args.total_timesteps:
        set_seeds(args.seed, RANK, run.iteration + 1)
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        steps = collect_steps(in_flight, policy, args.num_steps)  # by π_old, π_θ before update
        batch = make_batch(steps, policy, args)
        metrics = update(policy, optimizer, batch, args)
        if args.norm_obs:  # only now, so that π_old and π_θ normalize alike
            update_obs_stats(policy, batch["obs"])
        run.record(len(batch["obs"]), steps.episode_returns, metrics | episode_metrics(steps))

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


def episode_metrics(steps: Steps) -> dict[str, float]:
    """What is logged of the episodes that ended in an iteration, if any did."""
    if not steps.episode_returns:
        return {}
    return {
        "charts/episodic_return": np.mean(steps.episode_returns),
        "charts/episodic_length": np.mean(steps.episode_lengths),
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
    lowest |= {"log_std_init": -20}
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
    folder = Path(args.evaluate).parent
    envs = shown_envs(args, folder) or [make_env(args) for _ in range(args.num_envs)]
    policy = ActorCritic(envs[0].observation_space, envs[0].action_space, args)
    load(args.evaluate, {"policy": policy})
    evaluate(policy.to(device), envs, args)
    if args.capture_video:
        envs[0].close()  # which finishes the video


def main() -> None:
    """Train or, with --evaluate, play a saved policy."""
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # Windows' γ; a killed run's log
    sys.path.append("")  # modules of --env-id may lie in the current folder
    try:
        args = tyro.cli(Args)
        if path := args.evaluate or args.resume:  # options not given are the file's
            saved_args, _ = load(path, {})
            known = {name: saved_args[name] for name in asdict(args) if name in saved_args}
            args = tyro.cli(Args, default=Args(**known))
        if args.evaluate:
            play_saved(args)
        else:
            train(args)
    except (UserError, ModuleNotFoundError) as error:
        tqdm.write(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
