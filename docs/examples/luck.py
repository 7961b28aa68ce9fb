"""How much of the returns' variance does a seed explain? What a group that shares it cancels.

    python docs/examples/luck.py --env-id Pendulum-v1
    python docs/examples/luck.py --evaluate runs/<run>/checkpoint.pt    # with a trained policy

Plays 32 groups or more of 8 episodes, a group from one reset(seed=s), with sampled actions, and
compares the returns-to-go of equal time steps. What differs within a group is made by actions. The
rest is luck that the seed fixes: starts, arrivals, prices, noise. A value estimate cancels what can
be foreseen from the state: here by the regression of regression.py, fitted to as many episodes of
seeds of their own. Below 0 it is worse than the mean of all. An environment whose steps ignore the
seed has shares of 0, too: check it first (docs/environments.md).
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from torch import Tensor

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
    """The mean of x over the members alive, its dimensions kept."""
    return x.where(mask, 0).sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def seed_share(x: Tensor, mask: Tensor) -> float:
    """1 - (variance within groups) / (variance of all) of x [K, G, T] at each t, pooled over t."""
    alive = mask.sum(1, keepdim=True)  # [K, 1, T]
    counted = alive > 1  # one alone tells nothing of what is within its group
    counted &= counted.sum(0) > 1  # nor one group of what is between groups
    mask = mask & counted
    num_steps = mask.sum((0, 1))  # [T]
    within_freedom = num_steps - counted.sum((0, 1))
    within = (x - mean_over(x, mask, 1)).square().where(mask, 0).sum((0, 1))
    total = (x - mean_over(x, mask, (0, 1))).square().where(mask, 0).sum((0, 1))
    within = num_steps * within / within_freedom.clamp(min=1)
    total = num_steps * total / (num_steps - 1).clamp(min=1)
    return 1 - (within.sum() / total.sum()).item()


def state_share(fitted: Episodes, judged: Episodes, gamma: float) -> float:
    """What a regression fitted to some episodes foresees of the variance of others' returns."""
    features = cosines(fitted)  # [S, F]
    gram = features.T @ features / len(features)
    gram.diagonal()[1:] += RIDGE
    to_go = discounted_sums(fitted.rewards, gamma)[fitted.mask]  # [S]
    weights = torch.linalg.solve(gram, features.T @ to_go / len(features))

    to_go = discounted_sums(judged.rewards, gamma)  # [K, G, T]
    errors = to_go[judged.mask] - cosines(judged) @ weights
    deviations = (to_go - mean_over(to_go, judged.mask, (0, 1)))[judged.mask]
    return 1 - (errors.square().sum() / deviations.square().sum()).item()


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
    of_returns = seed_share(returns, torch.ones_like(returns, dtype=torch.bool))
    of_to_go = seed_share(to_go, grouped.mask)
    foreseen = state_share(single, grouped, args.gamma)
    print(f"{args.env_id}, {'trained' if args.evaluate else 'untrained'}: of the variance of")
    print(f"returns {of_returns:z.2f} is the seed's")
    print(f"returns-to-go {of_to_go:z.2f} is the seed's, and {foreseen:z.2f} is seen in the state")


if __name__ == "__main__":
    sys.path.append("")  # modules of --env-id may lie in the current folder
    args = tyro.cli(Args)
    try:
        main(tyro.cli(Args, default=saved_args(args.evaluate)) if args.evaluate else args)
    except UserError as error:
        print(f"luck.py: {error}", file=sys.stderr)
        sys.exit(2)
