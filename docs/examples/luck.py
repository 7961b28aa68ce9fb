"""How much of the returns' variance does a seed explain? What a group that shares it cancels.

    python docs/examples/luck.py --env-id Pendulum-v1
    python docs/examples/luck.py --evaluate runs/<run>/checkpoint.pt    # with a trained policy

Plays 32 groups or more of 8 episodes, a group from one reset(seed=s), with sampled actions, and
compares the returns-to-go of equal time steps. What differs within a group is made by actions. The
rest the seed fixes: starts, arrivals, prices, noise. A critic cancels what can be predicted from
the state: here by the regression of regression.py, fitted to as many episodes of seeds of their
own. The last line is what a shared seed cancels beyond that. With 32 seeds a share is exact to
about 0.1. An environment whose steps ignore the seed has 0, too: check it (docs/environments.md).
"""

import sys
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
    collect_groups,
    load_policy,
    make_env,
    saved_args,
    set_seeds,
)

NUM_GROUPS = 32
GROUP_SIZE = 8
MIN_STEPS = 20_000


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


def main(args: Args) -> None:
    torch.set_num_threads(1)  # as in training: more slow small networks down
    args.num_groups = NUM_GROUPS
    args.group_size = GROUP_SIZE
    args.minibatch_size = MIN_STEPS  # again until there are so many
    set_seeds(args.seed)
    envs = [make_env(args) for _ in range(NUM_GROUPS * GROUP_SIZE)]
    if args.evaluate:
        policy = load_policy(args.evaluate, envs[0], args)
    else:
        policy = Policy(envs[0].observation_space, envs[0].action_space, args)
    grouped = collect_groups(envs, policy, replace(args, seed_groups=True))
    single = collect_groups(envs, policy, replace(args, seed_groups=False))

    returns = grouped.rewards.sum(-1, keepdim=True)  # [K, G, 1]
    if returns.std() <= 1e-7 * returns.abs().max():
        raise UserError("All returns tie: nothing can be said.")
    to_go = discounted_sums(grouped.rewards, args.gamma)
    rest = to_go - predictions(single, grouped, args.gamma)
    of_state = 1 - rest[grouped.mask].square().sum() / squares(to_go, grouped.mask, (0, 1)).sum()
    of_returns = seed_share(returns, torch.ones_like(returns, dtype=torch.bool))
    print(f"{args.env_id}, {'trained' if args.evaluate else 'untrained'}: of the variance of")
    of_to_go = seed_share(to_go, grouped.mask)
    of_rest = seed_share(rest, grouped.mask)
    print(f"returns {max(of_returns, 0):.2f} is the seed's")  # an estimate may be below 0
    print(f"returns-to-go {max(of_to_go, 0):.2f} is the seed's,")
    print(f"and {max(of_state, 0):.2f} is predicted from state and time;")
    print(f"of what that leaves, {max(of_rest, 0):.2f} is the seed's")
    if of_to_go < 0.01:
        print("(0, too, if steps ignore the seed: docs/environments.md has a check)")


if __name__ == "__main__":
    sys.path.append("")  # modules of --env-id may lie in the current folder
    args = tyro.cli(Args, description=__doc__)
    try:
        main(tyro.cli(Args, default=saved_args(args.evaluate)) if args.evaluate else args)
    except (UserError, ModuleNotFoundError) as error:
        print(f"luck.py: {error}", file=sys.stderr)
        sys.exit(2)
