"""Which baseline suits an environment: a group that shares its seed, any group, or a critic?

    python docs/examples/luck.py --env-id Pendulum-v1
    python docs/examples/luck.py --evaluate runs/<run>/checkpoint.pt    # another policy

Plays 512 episodes or more with sampled actions, and takes a policy gradient of each group. From
their spread it estimates how many episodes make the mean gradient as large as its noise, the
gradient noise scale of arXiv:1812.06162. Fewer are better; inf: there is no gradient to be seen. It
measures a new policy, and that after --total-timesteps of training.

Why: a shared seed cancels luck that no action changes, and so the seed's share of the variance of
returns-to-go. But luck that decides which action is right misleads all its members alike. A critic
cancels what can be predicted from the state; here that is the regression of regression.py, fitted
to as many other episodes. If steps ignore the seed its share is 0, too (docs/environments.md has a
check).
"""

import math
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.examples.regression import RIDGE, cosines, discounted_sums
from grpo_rtg import (
    Args,
    Episodes,
    Policy,
    UserError,
    advantages_of,
    collect_groups,
    load_policy,
    make_env,
    saved_args,
    set_seeds,
    step_weights,
    train,
)

NUM_EPISODES = 512
MIN_STEPS = 5_000


def gradients(policy: Policy, episodes: Episodes, advantages: Tensor, args: Args) -> Tensor:
    """Of the sum of Â log π in each group, [K, P]: an iteration's first step is their mean."""
    sizes = episodes.mask.sum((1, 2)).tolist()
    weighted = (advantages * step_weights(episodes.mask, args.loss_agg))[episodes.mask].float()
    columns = (column.split(sizes) for column in (episodes.obs, episodes.actions, weighted))
    found = []
    for obs, actions, weights in zip(*columns):
        objective = (weights * policy(obs).log_prob(actions)).sum()
        parts = torch.autograd.grad(objective, list(policy.parameters()))
        found.append(torch.cat([part.flatten() for part in parts]).double())
    return torch.stack(found)


def signal_to_noise(square: Tensor, squares: Tensor, n: int) -> Tensor:
    """‖E g‖² / tr Cov g, each without bias, from ‖Σ g‖² and Σ ‖g‖² of n gradients g."""
    signal = (square - squares) / (n * (n - 1))
    noise = (squares - square / n) / (n - 1)
    return signal / noise


def episodes_needed(gradients: Tensor, group_size: int) -> list[float]:
    """The noise scale of gradients [K, P] in episodes, and its 95% interval by the jackknife."""
    n = len(gradients)
    total = gradients.sum(0)
    square = total.square().sum()
    each = gradients.square().sum(1)
    ratio = signal_to_noise(square, each.sum(), n)
    without = square - 2 * gradients @ total + each  # ‖Σ g‖² without each one
    ratios = signal_to_noise(without, each.sum() - each, n - 1)
    error = 2 * ((n - 1) * ratios.var(correction=0)).sqrt()
    bounds = (ratio, ratio + error, ratio - error)
    return [group_size / x.item() if x > 0 else math.inf for x in bounds]


def mean_over(x: Tensor, mask: Tensor, dim: int | tuple) -> Tensor:
    """The mean of x over the members still running, its dimensions kept."""
    return x.where(mask, 0).sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def squares(x: Tensor, mask: Tensor, dim: int | tuple) -> Tensor:
    """The sum of squared deviations from that mean, at each t."""
    return (x - mean_over(x, mask, dim)).square().where(mask, 0).sum((0, 1))


def seed_share(x: Tensor, mask: Tensor) -> float:
    """(variance between groups) / (all variance) of x [K, G, T] at equal t, pooled over t.

    Components of variance of a one-way layout with unequal groups, by the analysis of variance.
    """
    counted = mask.sum(1, keepdim=True) > 1  # one alone tells nothing of what is within its group
    counted &= counted.sum(0) > 1  # nor one group of what is between groups
    mask = mask & counted
    sizes = mask.sum(1)  # of groups, [K, T]
    total = sizes.sum(0)  # [T]
    groups = counted.sum((0, 1))  # [T]
    within = squares(x, mask, 1) / (total - groups).clamp(min=1)
    means = (squares(x, mask, (0, 1)) - squares(x, mask, 1)) / (groups - 1).clamp(min=1)
    size = (total - sizes.square().sum(0) / total.clamp(min=1)) / (groups - 1).clamp(min=1)
    between = (means - within) / size.clamp(min=1)
    return ((total * between).sum() / (total * (between + within)).sum()).item()


def predictions(fitted: Episodes, judged: Episodes, gamma: float) -> Tensor:
    """Returns-to-go of judged [K, G, T], by a regression on fitted's states and times."""
    length = max(fitted.mask.shape[-1], judged.mask.shape[-1])
    masks = [pad(x.mask, (0, length - x.mask.shape[-1])) for x in (fitted, judged)]
    obs = torch.cat([fitted.obs, judged.obs])
    features = cosines(fitted._replace(obs=obs, mask=torch.cat(masks)))
    known, new = features.split([len(fitted.obs), len(judged.obs)])
    gram = known.T @ known / len(known)
    gram.diagonal()[1:] += RIDGE
    to_go = discounted_sums(fitted.rewards, gamma)[fitted.mask]
    weights = torch.linalg.solve(gram, known.T @ to_go / len(known))
    return torch.zeros_like(judged.rewards).masked_scatter(judged.mask, new @ weights)


def measure(args: Args) -> dict[str, list[float]]:
    """Shares of the seed and of predictions; with each baseline, the episodes needed."""
    torch.set_num_threads(1)  # as in training: more slow small networks down
    num_groups = NUM_EPISODES // args.group_size
    args = replace(args, num_groups=num_groups, minibatch_size=MIN_STEPS)
    set_seeds(args.seed)
    envs = [make_env(args) for _ in range(num_groups * args.group_size)]
    if args.evaluate:
        policy = load_policy(args.evaluate, envs[0], args)
    else:
        policy = Policy(envs[0].observation_space, envs[0].action_space, args)
    shared = collect_groups(envs, policy, replace(args, seed_groups=True))
    single = collect_groups(envs, policy, replace(args, seed_groups=False))
    others = collect_groups(envs, policy, replace(args, seed_groups=False))

    returns = shared.rewards.sum(-1)
    if returns.std() <= 1e-7 * returns.abs().max():
        raise UserError("All returns tie: nothing can be said.")
    to_go = discounted_sums(shared.rewards, args.gamma)
    single_to_go = discounted_sums(single.rewards, args.gamma)
    rest = (single_to_go - predictions(others, single, args.gamma)).where(single.mask, 0)
    left = rest[single.mask].square().sum() / squares(single_to_go, single.mask, (0, 1)).sum()

    def needed(episodes: Episodes, advantages: Tensor) -> list[float]:
        return episodes_needed(gradients(policy, episodes, advantages, args), args.group_size)

    return {
        "seed_share": [max(seed_share(to_go, shared.mask), 0.0)],  # an estimate may be below 0
        "predicted": [max(1 - left.item(), 0.0)],
        "shared": needed(shared, advantages_of(shared, args)),
        "single": needed(single, advantages_of(single, args)),
        "critic": needed(single, rest),
    }


def report(policy: str, found: dict[str, list[float]]) -> None:
    print(f"With {policy} a gradient is as large as its noise with so many episodes (95%):")
    names = {"shared": "grpo_rtg.py", "single": "--no-seed-groups", "critic": "a critic"}
    for key, name in names.items():
        print(f"  {name:<16} {{:7.1f}} ({{:.1f}} to {{:.1f}})".format(*found[key]))
    share, predicted = *found["seed_share"], *found["predicted"]
    print(f"  of the returns' variance {share:.2f} is the seed's, {predicted:.2f} predicted\n")


def main(args: Args) -> None:
    if args.evaluate:
        return report("this policy", measure(args))
    report("a new policy", measure(args))
    with redirect_stdout(None):
        run = train(args)
    checkpoint = str(run.dir / "checkpoint.pt")
    report(f"{run.step:,} steps of training", measure(replace(args, evaluate=checkpoint)))


if __name__ == "__main__":
    sys.path.append("")  # modules of --env-id may lie in the current folder
    short = Args(exp_name="luck", total_timesteps=25_000, eval_episodes=1)
    args = tyro.cli(Args, default=short, description=__doc__)
    try:
        main(tyro.cli(Args, default=saved_args(args.evaluate)) if args.evaluate else args)
    except (UserError, ModuleNotFoundError) as error:
        print(f"luck.py: {error}", file=sys.stderr)
        sys.exit(2)
