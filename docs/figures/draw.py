"""The pictures that explain the project, beside those of the study, which docs/benchmark/report.py
draws.

    pip install -r docs/benchmark/requirements.txt
    python docs/figures/draw.py

variants.svg: the advantages of one group by every variant. A policy that has learned to land in
LunarLander plays eight episodes from one start; each panel has a row for each member and a column
for each time step.

neighbors.svg: one step of the same group, the steps that --baseline neighbors compares it with, the
larger the more they count, and those that --baseline timestep does.

flow.svg: the way of a group from one seed to one update, with the numbers of a small group of
CartPole.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))

import matplotlib.pyplot as plt
import numpy as np
import torch
from report import TEXT, save, style, use_style

import grpo_outcome
import grpo_process
import grpo_rtg


def trained(env_id: str, steps: int) -> tuple[list, grpo_rtg.Policy]:
    """Eight environments and a policy that has learned for some steps."""
    args = grpo_rtg.Args(
        env_id=env_id, total_timesteps=steps, baseline="timestep", num_groups=4, group_size=4
    )
    args.learning_rate, args.update_epochs, args.num_minibatches, args.eval_episodes = 3e-3, 8, 4, 1
    args.clip_coef = 0.3
    envs = [grpo_rtg.make_env(env_id) for _ in range(8)]
    policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        summary = grpo_rtg.train(args)
        _, states = grpo_rtg.load(summary["run_dir"] / "model.pt", env_id)
    policy.load_state_dict(states["policy"])
    return envs, policy


def landings() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, mask [1, 8, T] and observations [1, 8, T, 8] of a LunarLander group, by return."""
    envs, policy = trained("LunarLander-v3", 200_000)
    episodes = grpo_rtg.collect_groups(envs, policy, 1, np.random.default_rng(5))
    order = episodes.rewards[0].sum(-1).argsort(descending=True)
    blocks = episodes.rewards, episodes.mask, grpo_rtg.pad(episodes.obs, episodes.mask)
    return tuple(block[:, order] for block in blocks)


def draw_variants(rewards, mask, obs) -> None:
    group, timestep, neighbors = (
        grpo_rtg.compute_advantages(rewards, mask, 0.99, True, baseline, obs)
        for baseline in ("group", "timestep", "neighbors")
    )
    panels = {
        "outcome: one number for the whole episode": grpo_outcome.compute_advantages(
            rewards, mask, 1.0
        ),
        "process: normalized rewards, summed from each step on": grpo_process.compute_advantages(
            rewards, mask, 1.0
        ),
        "return-to-go, group: against all steps of the group": group,
        "return-to-go, timestep: against those alive at the same t": timestep,
        "return-to-go, neighbors: against the nearest steps of four others": neighbors,
    }
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 10.5), sharex=True, layout="constrained"
    )
    returns = rewards[0].sum(-1)
    for panel, (title, advantages) in zip(axes, panels.items()):
        shown = np.ma.masked_where(~mask[0].numpy(), advantages[0].numpy())
        limit = np.quantile(np.abs(shown.compressed()), 0.98)
        image = panel.imshow(
            shown, aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit, interpolation="nearest"
        )
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yticks(range(len(returns)), [f"{value:.0f}" for value in returns], fontsize=8)
        panel.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=panel, pad=0.01, aspect=10)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8)
    axes[-1].set_xlabel("time step")
    figure.supylabel("the eight members, by their returns", fontsize=10)
    save(figure, "variants")


def draw_neighbors(rewards, mask, obs, member: int, t: int) -> None:
    """Where the lander is at a step, where it is compared with, and what is still to come there."""
    returns_to_go = grpo_rtg.discounted_sums(rewards, 0.99)[0]  # [G, T]
    times = torch.arange(mask.shape[2]).expand_as(mask)[..., None]
    steps = torch.cat([obs, times], -1)[0]  # [G, T, 9]
    spread = steps[mask[0]].std(0, correction=0)
    squares = ((steps - steps[member, t]) / spread).square().sum(-1).where(mask[0], torch.inf)
    others = [i for i in range(len(steps)) if i != member]
    others.sort(key=lambda i: float(squares[i].min()))
    near = others[:4]
    nearest = squares[near].argmin(-1)
    weights = 1 / squares[near, nearest]
    alive = [i for i in others if mask[0, i, t]]
    ways, bars = plt.figure(figsize=(9, 4), layout="constrained").subplots(
        1, 2, width_ratios=(2, 1)
    )
    for i in range(len(steps)):
        x, y = obs[0, i, mask[0, i], :2].T
        own = i == member
        ways.plot(x, y, color="#E69F00" if own else TEXT, linewidth=1.6 if own else 0.7, zorder=own)
    groups = {
        "the step": ([member], [t], torch.ones(1), "#E69F00", "*"),
        "neighbors: the nearest steps of four others": (near, nearest, weights, "#009E73", "o"),
        f"timestep: the others at t = {t}": (alive, t, torch.ones(len(alive)), "#0072B2", "^"),
    }
    for y, (name, (who, when, weights, colour, marker)) in enumerate(groups.items()):
        share, values = weights / weights.sum(), returns_to_go[who, when]
        sizes = 200 if y == 0 else 30 + 400 * share  # their areas
        style_of = {"color": colour, "marker": marker, "alpha": 0.6, "linewidth": 0}
        ways.scatter(*steps[who, when, :2].T, sizes, zorder=3, **style_of)
        ways.plot([], [], marker, color=colour, label=name)
        bars.scatter(values, [y] * len(values), sizes, **style_of)
        mean = (share * values).sum()
        bars.plot([mean] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2.5)
        label = f"{mean:.1f}" if y == 0 else f"mean {mean:.1f}"
        bars.annotate(label, (mean, y - 0.36), ha="center", color=colour)
    ways.set(xlabel="horizontal position", ylabel="height")
    ways.legend(loc="upper left", frameon=False, fontsize=9, labelcolor="linecolor")
    bars.margins(x=0.15)
    bars.set(xlabel="return-to-go", yticks=[], ylim=(2.6, -0.7))
    for axes in (ways, bars):
        style(axes)
    save(ways.figure, "neighbors")


def draw_flow() -> None:
    torch.manual_seed(0)
    envs = [grpo_rtg.make_env("CartPole-v1") for _ in range(4)]
    policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space)
    episodes = grpo_rtg.collect_groups(envs, policy, 1, np.random.default_rng(12))
    mask = episodes.mask[0]
    advantages = grpo_rtg.compute_advantages(episodes.rewards, episodes.mask, 0.99)[0]
    lengths, longest = mask.sum(1).tolist(), mask.shape[1]

    figure = plt.figure(figsize=(12, 3.4), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=(1.5, 1.5, 1.7, 1.5))
    for panel in panels[:3]:
        panel.set(xlim=(-1, longest), ylim=(3.6, -0.6), yticks=range(4), xlabel="time step")
        panel.spines[:].set_visible(False)
        panel.set_yticklabels(
            [f"member {i + 1}" for i in range(4)] if panel is panels[0] else [""] * 4
        )
        panel.tick_params(length=0)
    panels[0].set_title("1  one seed, G episodes\ncollect_groups", fontsize=10)
    for i, length in enumerate(lengths):
        panels[0].plot([0, length - 1], [i, i], color="#0072B2", linewidth=2)
        panels[0].plot(0, i, "o", color="#E69F00", markersize=7)
        panels[0].plot(length - 1, i, "|", color="#0072B2", markersize=12, markeredgewidth=2)
    panels[0].annotate("reset(seed=s), the same for all", (0, -0.35), fontsize=8, color="#E69F00")
    panels[1].set_title(f"2  rewards and mask, padded\n[K, G, T] = [1, 4, {longest}]", fontsize=10)
    panels[1].imshow(np.where(mask, 1, np.nan), aspect="auto", cmap="Blues", vmin=0, vmax=1.6)
    for i, length in enumerate(lengths):
        panels[1].annotate(
            f"{length} × 1",
            (length / 2 - 0.5, i),
            ha="center",
            va="center",
            fontsize=8,
            color="white",
        )
    panels[2].set_title("3  advantages\ncompute_advantages", fontsize=10)
    limit = float(advantages.abs().max())
    shown = np.ma.masked_where(~mask.numpy(), advantages.numpy())
    image = panels[2].imshow(
        shown, aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit, interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=panels[2], pad=0.02, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)

    clip, ratio = 0.2, np.linspace(0.5, 1.5, 201)
    panels[3].set_title("4  clipped objective, per step\ngrpo_loss", fontsize=10)
    for sign, colour, label in ((1, "#8073AC", "Â = +1"), (-1, "#E08214", "Â = -1")):
        objective = np.minimum(ratio * sign, ratio.clip(1 - clip, 1 + clip) * sign)
        panels[3].plot(ratio, objective, color=colour, linewidth=2)
        panels[3].annotate(
            label, (0.52, objective[0] + 0.35 * sign), color=colour, fontsize=9, va="center"
        )
    panels[3].axvline(1, color=TEXT, linewidth=0.8, linestyle=":")
    panels[3].set(xlabel="ratio ρ = π_θ / π_old", xticks=(1 - clip, 1, 1 + clip), yticks=(-1, 0, 1))
    panels[3].set_xticklabels(["1-ε", "1", "1+ε"])
    panels[3].spines[["top", "right"]].set_visible(False)
    save(figure, "flow")


if __name__ == "__main__":
    use_style()
    draw_flow()
    group = landings()
    draw_variants(*group)
    draw_neighbors(*group, member=6, t=110)
