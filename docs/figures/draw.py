"""The pictures that explain the project.

    pip install -r docs/benchmark/requirements.txt
    python docs/figures/draw.py

variants.svg: the advantages of one group by every variant. A policy that has learned to land in
LunarLander plays eight episodes from one start; each panel has a row for each member and a column
for each time step.

flow.svg: the way of a group from one seed to one update, with the numbers of a small group of
CartPole.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_outcome
import grpo_process
import grpo_rtg

FIGURES = Path(__file__).parent
TEXT = "#808080"  # as far from white as from black


def save(figure, name: str) -> None:
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    print(path)


def use_style() -> None:
    """Text and axes in a grey that shows on white and on black, and files that repeat."""
    coloured = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color"
    plt.rcParams |= dict.fromkeys(coloured.split(), TEXT)
    plt.rcParams |= {"svg.hashsalt": "grpo", "font.size": 10}


def group(args: grpo_rtg.Args, seed: int, model: Path | None = None) -> grpo_rtg.Episodes:
    """A group of episodes, by a new policy or a saved one."""
    torch.manual_seed(seed)
    envs = [grpo_rtg.make_env(args) for _ in range(args.group_size)]
    policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space, args)
    if model:
        policy = grpo_rtg.load_policy(model, envs[0], args)
    return grpo_rtg.collect_groups(envs, policy, args)


def landings() -> grpo_rtg.Episodes:
    """A group of LunarLander, played by a policy that has learned for 600,000 steps."""
    args = grpo_rtg.Args(env_id="LunarLander-v3", total_timesteps=600_000, eval_episodes=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run = grpo_rtg.train(args)
        args.num_groups = 1
        args.group_size = 8
        return group(args, 5, run.dir / "checkpoint.pt")


def draw_variants(episodes: grpo_rtg.Episodes) -> None:
    rewards = episodes.rewards
    mask = episodes.mask
    by_group, by_timestep = (
        grpo_rtg.compute_advantages(rewards, mask, 0.99, baseline=baseline)
        for baseline in ("group", "timestep")
    )
    panels = {
        "outcome: one number for the whole episode": grpo_outcome.compute_advantages(
            rewards, mask, 1.0
        ),
        "process: normalized rewards, summed from each step on": grpo_process.compute_advantages(
            rewards, mask, 1.0
        ),
        "return-to-go, group: against all steps of the group": by_group,
        "return-to-go, timestep: against those alive at the same t": by_timestep,
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 8.5), sharex=True, layout="constrained")
    returns = rewards[0].sum(-1)
    order = returns.argsort(descending=True)
    for panel, (title, advantages) in zip(axes, panels.items()):
        shown = np.ma.masked_where(~mask[0, order].numpy(), advantages[0, order].numpy())
        limit = np.quantile(np.abs(shown.compressed()), 0.98)
        image = panel.imshow(
            shown, aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit, interpolation="nearest"
        )
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yticks(range(len(order)), [f"{x:.0f}" for x in returns[order]], fontsize=8)
        panel.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=panel, pad=0.01, aspect=10)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8)
    axes[-1].set_xlabel("time step")
    figure.supylabel("the eight members, by their returns", fontsize=10)
    save(figure, "variants")


def draw_flow() -> None:
    episodes = group(grpo_rtg.Args(num_groups=1, group_size=4, minibatch_size=1), 12)
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
    draw_variants(landings())
