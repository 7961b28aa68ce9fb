"""GRPO with returns-to-go for Gymnasium: PPO's objective, with a group in place of a critic.

    python grpo_rtg.py --env-id CartPole-v1
    python grpo_rtg.py --evaluate runs/<run>/model.pt --render

Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, section 4.1) samples a group of
G outputs to a question and judges each by the others. Here a question is a start state, fixed by
env.reset(seed=s), and an output an episode. The objective is Eq. 3 with the KL term of Eq. 4,
averaged over K groups:

    1/G Σ_i 1/|o_i| Σ_t { min(ρ Â, clip(ρ, 1-ε, 1+ε) Â) - β D_KL },    ρ = π_θ(a|s) / π_old(a|s)
    D_KL = π_ref/π_θ - log(π_ref/π_θ) - 1

This file's advantage (Kaggle discussion 573162, sb3-contrib #301) compares returns-to-go:

    R_{i,t} = Σ_{j≥t} γ^(j-t) r_{i,j},    Â_{i,t} = (R_{i,t} - mean) / std

The mean is over the members alive at t (--baseline timestep), over all the group's steps (group, as
published) or, weighted by 1/d², over the k nearest other episodes, of each the step nearest in
(s, t) (neighbors). std is that of R - mean over the group's steps.

    paper   here                      paper   here
    G       --group-size              π_old   log_probs, taken between a rollout and its update
    o_i     an episode (member)       π_ref   reference, renewed every --ref-update-interval
    |o_i|   its number of steps       ε, β    --clip-coef, --kl-coef
    ρ, Â    ratio, advantages         μ       --update-epochs

By default, unlike in the paper: β = 0 and π_ref = π_old (nothing is pretrained), a mean over steps
(Eq. 3: --loss-agg trajectory), minibatches, gradient clipping, a falling learning rate, a discount.
The algorithm ends with train; gather and average_gradients are for torchrun.
"""

import inspect
import io
import os
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # which NumPy reads when it is imported

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Options of a run. docs/results.md has tuned flags for other environments."""

    env_id: str = "CartPole-v1"  # Gymnasium id; "module:Name-v0" imports the module first
    seed: int = 1  # fixes weights, start states and sampling; with --evaluate, the episodes
    total_timesteps: int = 200_000  # environment steps; an iteration that exceeds them is dropped
    num_groups: int = 4  # K: groups per iteration, each from its own start state
    group_size: int = 8  # G: episodes per group
    gamma: float = 0.99  # γ: discount per step
    baseline: Literal["group", "timestep", "neighbors"] = "timestep"  # whose mean is subtracted
    num_neighbors: int = 4  # k of --baseline neighbors: how many other episodes count (0: all)
    norm_std: bool = True  # divide by the standard deviation (off: Dr. GRPO, arXiv:2503.20783)
    seed_groups: bool = True  # start a group in one state (off: a seed for each member)
    update_epochs: int = 8  # μ: passes over an iteration's steps
    num_minibatches: int = 8  # gradient steps per pass
    learning_rate: float = 5e-3  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall linearly to 0
    clip_coef: float = 0.2  # ε: the ratio is clipped to [1-ε, 1+ε]
    kl_coef: float = 0.0  # β: weight of the KL penalty towards π_ref
    ref_update_interval: int = 1  # iterations from one π_ref ← π_θ to the next (0: fixed)
    loss_agg: Literal["trajectory", "step"] = "step"  # mean over episodes (Eq. 3) or steps (DAPO)
    ent_coef: float = 0.0  # weight of an entropy bonus, in nats
    max_grad_norm: float = 0.5  # L2 norm to which the gradient is clipped
    target_kl: float = 0.0  # no more passes once KL(π_old, π_θ) exceeds this, in nats (0: off)
    hidden_size: int = 64  # units in each of the two hidden layers
    norm_obs: bool = False  # normalize observations by statistics kept in the model
    max_episode_steps: int = 0  # cut episodes here (0: the environment's limit, 1000 if none)
    cuda: bool = False  # train on a GPU if there is one
    num_threads: int = 1  # torch's CPU threads
    eval_interval: int = 0  # environment steps between evaluations (0: before and after training)
    eval_episodes: int = 100  # episodes of an evaluation
    greedy: bool = True  # evaluate the likeliest actions (off: sampled ones, as in training)
    render: bool = False  # show the episodes of evaluations in a window
    capture_video: bool = False  # record some episodes of each evaluation
    track: bool = False  # log to Weights & Biases as well (pip install wandb)
    checkpoint_interval: float = 10.0  # seconds between checkpoints
    resume: str | None = None  # go on from this checkpoint.pt; options not given are its own
    evaluate: str | None = None  # play the policy of this model.pt instead of training


def compute_advantages(
    rewards, mask, gamma: float, norm_std=True, baseline="timestep", obs=None, num_neighbors=4
) -> Tensor:
    """Advantages [K, G, T] of every step from rewards and mask [K, G, T], 0 where mask is False.

    baseline says what the mean is over; "neighbors" looks at obs [K, G, T, D].
    """
    returns_to_go = discounted_sums(rewards.double().where(mask, 0), gamma)
    if baseline == "neighbors":
        mean = nearest_mean(returns_to_go, obs, mask, num_neighbors)
    else:
        over = {"group": (1, 2), "timestep": 1}[baseline]
        mean = returns_to_go.sum(over, keepdim=True) / mask.sum(over, keepdim=True).clamp(min=1)
    return group_normalize(returns_to_go, mean, mask, norm_std)


def nearest_mean(x: Tensor, obs: Tensor, mask: Tensor, k: int) -> Tensor:
    """For each step the mean of x [K, G, T] over the nearest steps of the k nearest other episodes.

    One step of each, of any group (k = 0: of all), weighted by 1/d², d the distance in (obs, t)
    in standard deviations. In NumPy, whose argmin takes a fifth of torch's time.
    """
    episode, t = mask.flatten(0, 1).cpu().numpy().nonzero()  # [S] each
    steps = np.column_stack([obs[mask].cpu(), t])  # [S, D + 1] float64, or near steps would tie
    spread = np.where(np.ptp(steps, axis=0) > 0, steps.std(0), np.inf)
    steps = (steps - steps.mean(0)) / spread  # what never changes counts for nothing
    # |x - y|² - |x|² = [-2x, 1]·[y, |y|²] has the order of the distances from a step x to steps y
    rows = np.column_stack([-2 * steps, np.ones(len(t))])
    columns = np.column_stack([steps, (steps**2).sum(1)])
    episodes = np.split(np.arange(len(t)), np.flatnonzero(t == 0)[1:])  # N of them
    values, means = x[mask].cpu().numpy(), []
    for a in np.split(np.arange(len(t)), range(512, len(t), 512)):  # blocks of B bound the memory
        nearest = np.stack([b[(rows[a] @ columns[b].T).argmin(1)] for b in episodes], 1)  # [B, N]
        squares = ((steps[nearest] - steps[a, None]) ** 2).sum(2) + 1e-12  # d²
        squares[np.arange(len(a)), episode[a]] = 1e30  # its own: only if there is no other
        farthest = np.sort(squares)[:, : k or None][:, -1:]  # of the k nearest, [B, 1]
        weights = (squares <= (1 + 1e-9) * farthest) / squares
        means.append(np.average(values[nearest], 1, weights))
    return x.masked_scatter(mask, torch.from_numpy(np.concatenate(means)).to(x))


def pad(steps: Tensor, mask: Tensor) -> Tensor:
    """Steps [S, D] in the order of Episodes.obs as a block [K, G, T, D], 0 in the padding."""
    block = steps.new_zeros(*mask.shape, steps.shape[1])
    block.flatten(0, 1).transpose(0, 1)[mask.flatten(0, 1).T] = steps
    return block


def discounted_sums(x: Tensor, gamma: float) -> Tensor:
    """Σ_{j≥t} γ^(j-t) x_j along the last dimension."""
    sums, terms = x.clone(), 1
    while terms < x.shape[-1]:  # doubling: n terms + γ^n (the n terms from n steps later)
        sums[..., :-terms] += gamma**terms * sums[..., terms:]
        terms *= 2
    return sums


def group_normalize(x: Tensor, mean: Tensor, mask: Tensor, norm_std: bool) -> Tensor:
    """(x - mean) / std for x [K, ...], std that of each group's x - mean; 0 where mask is False.

    A group whose std is at most 10⁻⁶ of its largest |x| gives exactly 0: no ε is added to std.
    """
    group = tuple(range(1, x.dim()))
    deviation = (x - mean).where(mask, 0)
    freedom = (mask.sum(group, keepdim=True) - 1).clamp(min=1)  # Bessel's correction
    std = (deviation.square().sum(group, keepdim=True) / freedom).sqrt()
    tied = std <= 1e-6 * x.where(mask, 0).abs().amax(group, keepdim=True)
    return torch.where(tied, 0, deviation / std if norm_std else deviation)


def step_weights(mask: Tensor, loss_agg: str) -> Tensor:
    """Weights [K, G, T] with which .mean() averages as Eq. 3 ("trajectory") or DAPO ("step") does.

    Eq. 3 weighs a step of episode i by 1/(K G |o_i|); times S = Σ|o_i|, by which .mean() divides.
    """
    weights = mask.double()
    lengths = weights.sum(-1, keepdim=True)  # |o_i|, [K, G, 1]
    return weights if loss_agg == "step" else weights / lengths * lengths.mean()


def grpo_loss(policy, batch: dict, clip_coef: float, kl_coef: float, ent_coef: float):
    """Minus the objective of Eq. 3 on a flat batch of B steps, and the metrics that are logged.

    batch: obs [B, D], actions, and [B] each: log_probs under π_old, ref_log_probs under π_ref,
    advantages, weights (by step_weights).
    """
    log_probs, entropies = policy.log_prob_and_entropy(batch["obs"], batch["actions"])
    advantages, weights = batch["advantages"], batch["weights"]
    log_ratio, ref_log_ratio = log_probs - batch["log_probs"], batch["ref_log_probs"] - log_probs
    # Until an iteration's first gradient step ρ is 1: nothing is clipped, and the surrogate is the
    # weighted mean of Â, which says nothing of progress. Its gradient is the policy gradient.
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantages, clipped * advantages)  # Eq. 3
    policy_loss = -(weights * surrogate).mean()
    kl = (weights * (ref_log_ratio.exp() - ref_log_ratio - 1)).mean()  # Eq. 4
    entropy = (weights * entropies).mean()
    metrics = {"policy_loss": policy_loss, "kl": kl, "entropy": entropy}
    metrics["approx_kl"] = (ratio - 1 - log_ratio).mean()  # KL(π_old, π_θ)
    metrics["clipfrac"] = (ratio != clipped).float().mean()
    loss = policy_loss + (kl_coef * kl if kl_coef else 0) - (ent_coef * entropy if ent_coef else 0)
    return loss, {name: x.detach() for name, x in metrics.items()}


def mlp(num_inputs: int, hidden: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear output, with orthogonal weights and zero biases."""
    first, second = nn.Linear(num_inputs, hidden), nn.Linear(hidden, hidden)
    output = nn.Linear(hidden, num_outputs)
    for layer, gain in (first, 2**0.5), (second, 2**0.5), (output, output_gain):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), output)


class Policy(nn.Module):
    """Observations to a categorical (Discrete) or a diagonal Gaussian (Box) over actions."""

    def __init__(self, obs_space, action_space, hidden_size=64, norm_obs=False):
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

    def normalize(self, obs: Tensor) -> Tensor:
        """With norm_obs, [B, D] in standard deviations from the running mean."""
        if not self.norm_obs:
            return obs
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def update_obs_stats(self, obs: Tensor) -> None:
        """Merge observations [S, D] into the running mean and variance (Chan et al. 1979)."""
        obs = obs.to(self.obs_mean.device)
        weight, delta = len(obs) / (self.obs_count + len(obs)), obs.mean(0) - self.obs_mean
        self.obs_var += weight * (obs.var(0, correction=0) - self.obs_var + (1 - weight) * delta**2)
        self.obs_mean += weight * delta
        self.obs_count += len(obs)

    def forward(self, obs: Tensor) -> Tensor:
        """Logits (Discrete) or means (Box) [B, A] for observations [B, D]."""
        return self.net(self.normalize(obs))

    def log_prob_and_entropy(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π_θ(a|s) and the entropy of π_θ(·|s), [B] in nats, for obs [B, D] and actions."""
        outputs = self(obs)
        if self.discrete:
            log_probs = outputs.log_softmax(-1)  # [B, A]
            of_actions = log_probs.gather(-1, actions[:, None]).squeeze(-1)
            return of_actions, -(log_probs.exp() * log_probs).sum(-1)
        normal = torch.distributions.Normal(outputs, self.log_std.exp(), validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)

    @torch.no_grad()
    def log_probs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """log π_θ(a|s) [S] of a rollout's steps, in slices that bound the memory."""
        slices = zip(obs.split(2048), actions.split(2048))
        return torch.cat([self.log_prob_and_entropy(*each)[0] for each in slices])

    def sampler(self, rng=None):
        """A function from obs [B, D] to actions of the policy as it is now; greedy without rng."""
        outputs_of = fast_forward(self)
        std = None if self.discrete else self.log_std.detach().exp().cpu().numpy()  # [A]

        def sample(obs):
            x = outputs_of(obs)
            if self.discrete:  # the largest of logits + Gumbel noise samples their softmax
                return (x if rng is None else x + rng.gumbel(size=x.shape)).argmax(-1)
            return x if rng is None else x + std * rng.standard_normal(x.shape, np.float32)

        return sample

    def to_env(self, actions: np.ndarray) -> list:
        """Actions for env.step: Discrete ones shifted to the space's start, Box ones clipped."""
        space = self.action_space
        if self.discrete:
            return list((actions + space.start).astype(space.dtype))
        actions = actions.reshape(-1, *space.shape).clip(space.low, space.high)
        return list(actions.astype(space.dtype))


class Episodes(NamedTuple):
    """An episode of each of K·G environments: S steps, flat, and blocks padded to T steps."""

    obs: Tensor  # [S, D] float32, ordered by time
    actions: Tensor  # [S] int64 (Discrete) or [S, A] float32 (Box, before clipping)
    rewards: Tensor  # [K, G, T] float64, 0 in the padding
    mask: Tensor  # [K, G, T] bool, True where a step was taken

    def flatten(self, block: Tensor) -> Tensor:
        """The values of a block [K, G, T] at the steps taken, [S] in the order of obs."""
        return block.flatten(0, 1).T[self.mask.flatten(0, 1).T]


def play_episodes(envs: list, policy: Policy, seeds: list, rng=None, num_groups=1) -> Episodes:
    """Play an episode from reset(seed=seeds[i]) in each environment, stepping it until it ends.

    Actions are sampled with rng, greedy without. UserError for NaN or infinity.
    """
    sample, alive = policy.sampler(rng), list(range(len(seeds)))
    obs, steps, rewards, action = [], [], [], None
    try:
        for i in alive:
            obs.append(envs[i].reset(seed=seeds[i])[0])
        while alive:
            now = np.array(obs, np.float32).reshape(len(alive), len(policy.obs_mean))  # [B, D]
            actions = sample(now)
            steps.append((now, actions, alive))
            stepped, alive, obs = alive, [], []
            for i, action in zip(stepped, policy.to_env(actions)):
                seen, reward, terminated, truncated, _ = envs[i].step(action)
                rewards.append(float(reward))
                if not (terminated or truncated):
                    alive.append(i)
                    obs.append(seen)
    except Exception as error:
        error.add_note(f"{envs[i].unwrapped}: reset(seed={seeds[i]}), step {len(steps)}: {action}")
        raise
    flat_obs, actions, member = (torch.from_numpy(np.concatenate(column)) for column in zip(*steps))
    mask = torch.arange(len(steps)) < member.bincount()[:, None]  # [N, T]
    padded = torch.zeros(mask.shape, dtype=torch.float64)
    padded.T[mask.T] = torch.tensor(rewards, dtype=torch.float64)
    if not (flat_obs.isfinite().all() and padded.isfinite().all()):
        raise UserError(f"{envs[0].unwrapped} gives numbers that are not finite.")
    blocks = (block.view(num_groups, -1, len(steps)) for block in (padded, mask))
    return Episodes(flat_obs, actions, *blocks)


def collect_groups(envs: list, policy: Policy, num_groups: int, rng, seed_groups=True) -> Episodes:
    """Sample K groups of G episodes: envs k·G to (k+1)·G - 1 form group k and share a reset seed.

    With seed_groups False each has its own. UserError if a group's first observations differ.
    """
    seeds = rng.integers(2**31, size=num_groups if seed_groups else len(envs))
    seeds = seeds.repeat(len(envs) // len(seeds)).tolist()
    episodes = play_episodes(envs, policy, seeds, rng, num_groups)
    starts = episodes.obs[: len(envs)].view(num_groups, -1, episodes.obs.shape[1])  # at t = 0
    if seed_groups and (starts != starts[:, :1]).any():
        raise UserError(f"{envs[0].unwrapped} ignores reset(seed): fix it, or --no-seed-groups.")
    return episodes


def make_batch(episodes: Episodes, advantages: Tensor, policy, reference, args: Args) -> dict:
    """The steps of K groups as grpo_loss takes them, [S, ...] on the policy's device."""
    blocks = {"advantages": advantages, "weights": step_weights(episodes.mask, args.loss_agg)}
    batch = {"obs": episodes.obs, "actions": episodes.actions}
    batch |= {name: episodes.flatten(block).float() for name, block in blocks.items()}
    batch = {name: x.to(policy.obs_mean.device) for name, x in batch.items()}
    # π_old is the policy that sampled: it has not moved yet
    batch["log_probs"] = batch["ref_log_probs"] = policy.log_probs(batch["obs"], batch["actions"])
    if args.ref_update_interval != 1:  # else π_ref is π_old
        batch["ref_log_probs"] = reference.log_probs(batch["obs"], batch["actions"])
    return batch


def update(policy, optimizer, batch: dict, args: Args, rng) -> dict[str, float]:
    """μ passes over a flat batch, each in shuffled minibatches; returns the metrics' means."""
    coefs = args.clip_coef, args.kl_coef, args.ent_coef
    history, num_minibatches = [], min(args.num_minibatches, *gather(len(batch["obs"])))
    for _ in range(args.update_epochs):
        order = torch.from_numpy(rng.permutation(len(batch["obs"]))).to(batch["obs"].device)
        shuffled = [x[order].tensor_split(num_minibatches) for x in batch.values()]
        for minibatch in zip(*shuffled):
            loss, metrics = grpo_loss(policy, dict(zip(batch, minibatch)), *coefs)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(policy, len(batch["obs"]) if args.loss_agg == "step" else 1)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            history.append(torch.stack(list(metrics.values())))
        if args.target_kl and np.mean(gather(metrics["approx_kl"].item())) > args.target_kl:
            break
    means = np.mean(gather(torch.stack(history).mean(0).tolist()), axis=0)
    return dict(zip(metrics, means.tolist()))


def train(args: Args) -> dict:
    """Algorithm 1 of the paper, its lines named in the comments; returns what Run.finish does."""
    run = Run(args)  # line 1: π_θ, π_ref, the optimizer, K·G environments, random numbers
    policy, reference, optimizer, rng = *run.trained.values(), run.rng
    while True:  # lines 2 and 4
        if args.ref_update_interval and run.iteration % args.ref_update_interval == 0:
            reference.load_state_dict(policy.state_dict())  # line 3: π_ref ← π_θ
        # lines 5 to 8: K start states, G episodes of π_old ← π_θ from each, their rewards
        episodes = collect_groups(run.envs, policy, run.num_groups, rng, args.seed_groups)
        new_steps = sum(gather(len(episodes.obs)))  # of all processes
        if run.step + new_steps > args.total_timesteps:
            return run.finish()  # the iteration is dropped
        blocks = episodes.rewards, episodes.mask  # [K, G, T]
        baseline = args.baseline, pad(episodes.obs, episodes.mask), args.num_neighbors
        advantages = compute_advantages(*blocks, args.gamma, args.norm_std, *baseline)  # line 9
        batch = make_batch(episodes, advantages, policy, reference, args)  # log π_old, log π_ref
        budget_left = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = args.learning_rate * budget_left
        metrics = update(policy, optimizer, batch, args, rng)  # lines 10 and 11
        if args.norm_obs:
            policy.update_obs_stats(torch.cat(gather(episodes.obs)))  # frozen in an iteration
        run.record(episodes, advantages, new_steps, metrics)


# --- The program around the algorithm ---

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "numpy==2.4.6",
#   "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "moviepy==2.2.1"]
# ///


class UserError(ValueError):
    """What the user can put right: main prints the sentence and exits with status 2."""


def make_env(env_id: str, max_episode_steps: int = 0, video_dir=None, **options) -> gym.Env:
    """An environment with flat observations whose episodes end, or UserError."""
    try:
        env = gym.make(env_id, max_episode_steps or None, disable_env_checker=True, **options)
        env = gym.wrappers.RecordVideo(env, str(video_dir)) if video_dir else env
    except (gym.error.Error, ImportError, ValueError) as error:
        raise UserError(f"Cannot make {env_id}: {' '.join(str(error).split())}") from error
    if env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 1000)
    obs, actions = env.observation_space, env.action_space
    is_box = isinstance(actions, gym.spaces.Box) and actions.dtype.kind == "f"
    if not obs.is_np_flattenable or not (is_box or isinstance(actions, gym.spaces.Discrete)):
        wrong = "observations cannot be flattened, or actions are not Discrete or float Box"
        raise UserError(f"{env_id}: {wrong}: {obs}, {actions}.")
    flat = isinstance(obs, gym.spaces.Box) and len(obs.shape) == 1
    return env if flat else gym.wrappers.FlattenObservation(env)


def fast_forward(policy: Policy):
    """policy.forward on NumPy arrays; on the CPU without torch, in a third of the time."""
    device = policy.obs_mean.device
    if device.type != "cpu" or not all(isinstance(x, nn.Linear | nn.Tanh) for x in policy.net):
        return torch.no_grad()(lambda x: policy(torch.from_numpy(x).to(device)).cpu().numpy())
    layers = [[x.detach().numpy().T.copy() for x in layer.parameters()] for layer in policy.net]

    def forward(x):
        x = policy.normalize(torch.from_numpy(x)).numpy() if policy.norm_obs else x
        for parameters in layers:  # a Linear's weight and bias; a Tanh has none
            x = x @ parameters[0] + parameters[1] if parameters else np.tanh(x)
        return x

    return forward


class Adam(torch.optim.Adam):
    """torch's Adam without the decorators that import its compiler: starts a second sooner."""


for name in ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"):
    setattr(Adam, name, torch.no_grad()(inspect.unwrap(getattr(Adam, name))))


def evaluate(policy: Policy, args: Args, seed: int = 10**9, video_dir=None) -> np.ndarray:
    """Print and give the returns of --eval-episodes episodes, episode i from reset(seed=seed+i)."""
    shown = {"render_mode": "human"} if args.render else {}
    shown = {"render_mode": "rgb_array", "video_dir": video_dir} if video_dir else shown
    envs = [make_env(args.env_id, args.max_episode_steps, **shown)]
    while len(envs) < (1 if args.render else min(args.eval_episodes, 20)):
        envs.append(make_env(args.env_id, args.max_episode_steps))
    seeds, returns = list(range(seed, seed + args.eval_episodes)), []
    rng = None if args.greedy else np.random.default_rng(seed)
    for i in range(0, len(seeds), len(envs)):
        episodes = play_episodes(envs, policy, seeds[i : i + len(envs)], rng)
        returns += episodes.rewards.sum(-1).flatten().tolist()
    for env in envs:
        env.close()  # which also finishes a video
    how, mean, std = "Greedy" if args.greedy else "Sampled", np.mean(returns), np.std(returns)
    tqdm.write(f"{how} evaluation, {len(returns)} episodes: return {mean:.2f} ± {std:.2f}")
    return np.array(returns)


class Run:
    """What a run trains and how far it is, kept in checkpoints, and its files."""

    PROGRESS = "iteration step seconds recent best evaluated untrained eval_returns rngs"

    def __init__(self, args: Args):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        check_args(args, self.world)
        torch.set_num_threads(args.num_threads)
        torch.manual_seed(args.seed)
        self.args, self.num_groups = args, args.num_groups // self.world
        num_envs = self.num_groups * args.group_size
        self.envs = [make_env(args.env_id, args.max_episode_steps) for _ in range(num_envs)]
        device = torch.device("cpu")
        if args.cuda and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)  # else all processes would use the first
        elif args.cuda:
            print("WARNING: --cuda was asked for, but there is no GPU; USING THE CPU")
        if self.world > 1:
            dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        spaces = self.envs[0].observation_space, self.envs[0].action_space
        policy = Policy(*spaces, args.hidden_size, args.norm_obs).to(device)
        optimizer = Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)
        self.trained = {"policy": policy, "reference": deepcopy(policy), "optimizer": optimizer}
        self.rng = np.random.default_rng([args.seed, self.rank])
        self.rngs = gather(self.rng.bit_generator.state)  # of all processes, by rank
        self.iteration, self.step, self.seconds = 0, 0, 0.0
        self.recent = []  # returns of the last 100 training episodes
        self.untrained, self.eval_returns = [], []  # of the evaluations before training, and last
        self.best, self.evaluated = -np.inf, -1  # best mean evaluation, step of the last one
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        self.dir = Path("runs", name.replace("/", "-").replace(":", "-"))
        if args.resume is not None:
            self.dir = Path(args.resume).parent
            _, states = load(args.resume, args.env_id, self.trained)
            vars(self).update({name: states[name] for name in self.PROGRESS.split()})
            if len(self.rngs) != self.world:
                raise UserError(f"{args.resume} is of a run of {len(self.rngs)} processes.")
            self.rng.bit_generator.state = self.rngs[self.rank]
        self.started, self.saved = time.perf_counter() - self.seconds, -np.inf
        if self.rank == 0:
            self.open_logs()
            print("Device:", "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device))
            if self.step == 0:
                few = replace(args, eval_episodes=min(args.eval_episodes, 10), render=False)
                self.untrained = evaluate(policy, few).tolist()
            print(f"If it stops: the same command with --resume {self.dir / 'checkpoint.pt'}")
        progress = {"total": args.total_timesteps, "initial": self.step, "disable": self.rank > 0}
        self.bar = tqdm(**progress, unit=" steps", unit_scale=True, mininterval=1)
        self.evaluate_and_save()

    def open_logs(self) -> None:
        """Open TensorBoard's log, and W&B's; a resumed run goes on from its checkpoint."""
        options, name = asdict(self.args), self.dir.resolve().name
        if self.args.track:
            import wandb

            wandb.init(id=name, name=name, resume="allow", config=options, sync_tensorboard=True)
        self.writer = SummaryWriter(self.dir, purge_step=self.step + 1)
        rows = "".join(f"\n|{name}|{value}|" for name, value in options.items())
        self.writer.add_text("hyperparameters", f"|option|value|\n|-|-|{rows}", self.step)

    def record(self, episodes: Episodes, advantages: Tensor, new_steps: int, metrics: dict) -> None:
        """Count, log and show an iteration of all processes; evaluate and save if due."""
        if not np.isfinite(metrics["policy_loss"] + metrics["grad_norm"]):
            raise UserError("The update became NaN or infinite: lower --learning-rate.")
        tied = (advantages == 0).flatten(1).all(1)  # [K]
        shared = gather((episodes.rewards.sum(-1), tied, self.rng.bit_generator.state))
        returns, tied, self.rngs = map(list, zip(*shared))
        returns, tied = torch.cat(returns), torch.cat(tied)  # [K, G], [K]
        if tied.all() and self.iteration == 0 and self.rank == 0:
            why = "every step pays the same" if returns.diff().any() else "its members tie"
            tqdm.write(f"No signal yet: all advantages are 0, for in each group {why}.")
        self.iteration, self.step = self.iteration + 1, self.step + new_steps
        self.recent = (self.recent + returns.flatten().tolist())[-100:]
        self.seconds = time.perf_counter() - self.started
        scalars = {f"losses/{name}": value for name, value in metrics.items()}
        scalars["charts/episodic_return"] = returns.mean()
        scalars["charts/episodic_length"] = new_steps / returns.numel()
        scalars["charts/SPS"] = self.step / self.seconds
        scalars["charts/learning_rate"] = self.trained["optimizer"].param_groups[0]["lr"]
        scalars["group/zero_std_frac"] = tied.double().mean()
        scalars["group/return_std"] = returns.std(-1).mean()
        for name, value in scalars.items() if self.rank == 0 else ():
            self.writer.add_scalar(name, float(value), self.step)
        shown = f"return={np.mean(self.recent):.1f}, approx_kl={metrics['approx_kl']:.4f}"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(new_steps)
        self.evaluate_and_save()

    def evaluate_and_save(self, finished: bool = False) -> None:
        """Every --eval-interval steps and --checkpoint-interval seconds, and when finished."""
        if self.rank > 0:
            return
        args, policy, interval = self.args, self.trained["policy"], self.args.eval_interval
        due = interval and self.step // interval > self.evaluated // interval
        if due or (finished and self.step > self.evaluated):
            videos = self.dir / "videos" / str(self.step) if args.capture_video else None
            self.eval_returns = evaluate(policy, args, video_dir=videos).tolist()
            self.evaluated, mean = self.step, float(np.mean(self.eval_returns))
            self.writer.add_scalar("eval/episodic_return", mean, self.step)
            if mean > self.best:
                self.best = mean
                save(self.dir / "best.pt", args, policy=policy.state_dict())
        if finished or time.perf_counter() - self.saved >= args.checkpoint_interval:
            self.writer.flush()
            states = {name: part.state_dict() for name, part in self.trained.items()}
            states |= {name: getattr(self, name) for name in self.PROGRESS.split()}
            save(self.dir / "checkpoint.pt", args, **states)
            self.saved = time.perf_counter()

    def finish(self) -> dict:
        """Save, evaluate, report; return run_dir, steps, seconds, train_return and eval_returns."""
        self.bar.close()
        for env in self.envs:
            env.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.iteration == 0:
            raise UserError(f"--total-timesteps {self.args.total_timesteps} allows no iteration.")
        if self.rank > 0:
            return {}
        model, rate = self.dir / "model.pt", self.step / self.seconds
        train_return = np.mean(self.recent or np.nan)
        print(f"Trained {self.step:,} steps in {self.seconds:.1f} s ({rate:,.0f} steps/s)")
        print(f"Training return, last 100 episodes: {train_return:.2f}")
        save(model, self.args, policy=self.trained["policy"].state_dict())
        self.evaluate_and_save(finished=True)
        self.writer.close()
        if np.mean(self.eval_returns[: len(self.untrained)]) <= np.mean(self.untrained):
            print("It plays no better than before training: docs/environments.md says what to try.")
        print(f"Logs:  tensorboard --logdir {self.dir.parent}")
        module = f" --env-id {self.args.env_id}" if ":" in self.args.env_id else ""  # see load
        print(f"Watch: python {os.path.relpath(__file__)} --evaluate {model} --render{module}")
        ended = {"run_dir": self.dir, "steps": self.step, "seconds": self.seconds}
        return ended | {"train_return": train_return, "eval_returns": np.array(self.eval_returns)}


def save(path: Path, args: Args, **states) -> None:
    """Write the file whole or not at all: a kill or a full disk leaves the one before."""
    buffer, part = io.BytesIO(), path.with_suffix(".part")
    torch.save({"script": Path(__file__).stem, "args": asdict(args), **states}, buffer)
    try:
        with open(part, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str, env_id: str, parts: dict | None = None) -> tuple[Args, dict]:
    """The options and states that save wrote; parts, such as a network, load theirs.

    A stranger's file runs no code: it is plain data, and an environment whose id imports a module
    must be env_id. UserError if the file is not for this.
    """
    try:
        states = dict(torch.load(path, map_location="cpu", weights_only=True))
        if states["script"] != Path(__file__).stem:
            raise UserError(f"it was made by {states['script']}.py")
        args = Args(**states["args"])
        if args.env_id != env_id and (parts or ":" in args.env_id):  # ":" imports a module
            raise UserError(f"it is for {args.env_id}; if you trust it, add that as --env-id")
        for name, part in (parts or {}).items():
            part.load_state_dict(states[name])
    except Exception as error:  # torch.load alone raises half a dozen kinds
        why = error if isinstance(error, UserError | OSError) else "it is incomplete or unfit"
        raise UserError(f"Cannot use {path} here: {why}") from error
    return args, states


def gather(value) -> list:
    """The value that each of torchrun's processes has, by rank; without torchrun [value]."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def average_gradients(policy: Policy, weight: float) -> None:
    """Under torchrun the mean of the processes' gradients by weight, in one message."""
    if dist.is_initialized():
        gradients = [parameter.grad for parameter in policy.parameters()]
        flat = nn.utils.parameters_to_vector([*gradients, gradients[0].new_ones(1)]) * weight
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat[:-1] / flat[-1], gradients)


def check_args(args: Args, world: int = 1) -> None:
    """UserError if an option is out of range, or processes cannot share the groups."""
    positive = "total_timesteps num_groups update_epochs num_minibatches hidden_size num_threads"
    lowest = {"group_size": 2, "eval_episodes": 1} | dict.fromkeys(positive.split(), 1)
    highest = {"gamma": 1, "hidden_size": 2**14, "num_threads": 2**10}
    for name, value in vars(args).items():
        option, low, high = name.replace("_", "-"), lowest.get(name, 0), highest.get(name, 2**40)
        if isinstance(value, int | float) and not low <= value <= high:  # NaN is not, either
            raise UserError(f"--{option} must be from {low:,} to {high:,}, not {value}.")
    if args.num_groups % world:
        raise UserError(f"--num-groups {args.num_groups} cannot be split over {world} processes.")


def main() -> None:
    """Train or, with --evaluate, play a saved policy."""
    args = tyro.cli(Args)
    try:
        if args.evaluate is None:
            if args.resume is not None:
                args = tyro.cli(Args, default=load(args.resume, args.env_id)[0])
            train(args)
            return
        trained, _ = load(args.evaluate, args.env_id)
        kept = "env_id", "max_episode_steps", "hidden_size", "norm_obs"
        args = tyro.cli(Args, default=Args(**{name: getattr(trained, name) for name in kept}))
        check_args(args)
        env = make_env(args.env_id)
        spaces = env.observation_space, env.action_space
        policy = Policy(*spaces, args.hidden_size, args.norm_obs)
        load(args.evaluate, args.env_id, {"policy": policy})
        videos = Path(args.evaluate).parent / "videos" if args.capture_video else None
        evaluate(policy, args, 10**9 + 10**6 * (args.seed - 1), videos)  # --seed: other episodes
    except (UserError, ModuleNotFoundError, gym.error.DependencyNotInstalled) as error:
        tqdm.write(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
