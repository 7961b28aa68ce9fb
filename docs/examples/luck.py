"""Which baseline suits an environment: a group that shares its seed, any group, or a critic?

    python docs/examples/luck.py --env-id Pendulum-v1
    python docs/examples/luck.py --evaluate runs/<run>/checkpoint.pt    # another policy

With each of them the expected policy gradient is the same, and its variance is not. This plays
about 1024 episodes with sampled actions, takes a gradient of each group, and compares the variances
(the traces of their covariances): how many episodes of the others make as accurate a gradient as
100 of groups that share their seeds? Above 100 the seeded group is better. It measures a new
policy, and that after --total-timesteps of training, for what is best may change.

Why: a shared seed cancels luck that no action changes, and so the seed's share of the variance of
returns-to-go. But luck that decides which action is right misleads all its members alike. A critic
cancels what can be predicted from the state; here that is the regression of regression.py, fitted
to as many other episodes. Luck of steps that ignore the seed nobody cancels (docs/environments.md
has a check).

The group's mean is that of the other members, whose expectation is right; no advantage is divided
by std, and the critic has no λ: --baseline and --norm-std do nothing here. Steps of a group's last
member alive are left out of all three. Where few groups have most of the variance an interval is
too narrow.
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
    check_args,
    collect_groups,
    load_policy,
    make_env,
    saved_args,
    set_seeds,
    train,
)

NUM_EPISODES = 1024
MIN_STEPS = 5_000


def leave_one_out(returns: Tensor, mask: Tensor) -> Tensor:
    """R minus the mean of the other members alive at t, [K, G, T]; one alone and ties get 0."""
    alive = mask.sum(1, keepdim=True)
    differences = (returns - mean_over(returns, mask, 1)).where(mask, 0)
    tied = differences.abs().amax((1, 2)) <= 1e-7 * returns.abs().amax((1, 2))
    return (differences * alive / (alive - 1).clamp(min=1)).where(~tied[:, None, None], 0)


def gradients(policy: Policy, episodes: Episodes, advantages: Tensor) -> Tensor:
    """Of the sum of Â log π in each group, [K, P]."""
    sizes = episodes.mask.sum((1, 2)).tolist()
    columns = (episodes.obs, episodes.actions, advantages[episodes.mask].float())
    found = []
    for obs, actions, weights in zip(*(column.split(sizes) for column in columns)):
        objective = (weights * policy(obs).log_prob(actions)).sum()
        parts = torch.autograd.grad(objective, list(policy.parameters()))
        found.append(torch.cat([part.flatten() for part in parts]).double())
    return torch.stack(found)


def variance(gradients: Tensor) -> tuple[float, float]:
    """The trace of the covariance of gradients [K, P], and its standard error over itself."""
    distances = (gradients - gradients.mean(0)).square().sum(1)
    error = distances.std() / len(distances) ** 0.5
    return distances.sum().item() / (len(distances) - 1), (error / distances.mean()).item()


def ratio(gradients: Tensor, reference: Tensor) -> list[float]:
    """100 times one variance over another, and its 95% interval: in logarithms, ± 2 errors."""
    (top, top_error), (bottom, bottom_error) = variance(gradients), variance(reference)
    if not (top > 0 and bottom > 0):
        raise UserError("All groups tie: nothing can be said.")
    point = 100 * top / bottom
    factor = math.exp(2 * math.hypot(top_error, bottom_error))
    return [point, point / factor, point * factor]


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
    """Shares of the seed and of predictions, and each baseline's variance beside the group's."""
    torch.set_num_threads(1)  # as in training: more slow small networks down
    check_args(args)
    num_groups = NUM_EPISODES // args.group_size
    if num_groups < 8:
        raise UserError(f"--group-size must be at most {NUM_EPISODES // 8}.")
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

    to_go = discounted_sums(shared.rewards, args.gamma)
    single_to_go = discounted_sums(single.rewards, args.gamma)
    rest = (single_to_go - predictions(others, single, args.gamma)).where(single.mask, 0)
    left = rest[single.mask].square().sum() / squares(single_to_go, single.mask, (0, 1)).sum()
    rest = rest.where(single.mask.sum(1, keepdim=True) > 1, 0)  # as in a group
    of_seeded = gradients(policy, shared, leave_one_out(to_go, shared.mask))
    of_single = gradients(policy, single, leave_one_out(single_to_go, single.mask))
    return {
        "seed_share": [max(seed_share(to_go, shared.mask), 0)],  # an estimate may be below 0
        "predicted": [max(1 - left.item(), 0)],
        "single": ratio(of_single, of_seeded),
        "critic": ratio(gradients(policy, single, rest), of_seeded),
    }


def report(policy: str, found: dict[str, list[float]]) -> None:
    print(f"With {policy}, 100 episodes in groups that share a seed make as good a gradient as")
    print("  {:.0f} ({:.0f} to {:.0f}) in groups that do not".format(*found["single"]))
    print("  {:.0f} ({:.0f} to {:.0f}) with a critic".format(*found["critic"]))
    share, predicted = *found["seed_share"], *found["predicted"]
    print(f"Of the returns' variance {share:.2f} is the seed's, {predicted:.2f} predicted.")


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
    short = Args(exp_name="luck", total_timesteps=50_000, eval_episodes=1)
    args = tyro.cli(Args, default=short, description=__doc__)
    try:
        main(tyro.cli(Args, default=saved_args(args.evaluate)) if args.evaluate else args)
    except (UserError, ModuleNotFoundError) as error:
        print(f"luck.py: {error}", file=sys.stderr)
        sys.exit(2)
