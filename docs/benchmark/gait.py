"""Whether a policy trained on HalfCheetah-v5 runs on its feet or slides on its back: 20 greedy
episodes, one a line.

    python docs/benchmark/gait.py runs/RUN/model.pt

Each line has an episode's return and the torso's mean pitch, the second number of an observation,
over the episode's second half, in radians: 0 on its feet, π on its back. The episodes are the first
20 of the script's own evaluation.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

# as in the scripts: another order of sums is another episode
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from run import load_policy

ENV_ID = "HalfCheetah-v5"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the model.pt of a run on HalfCheetah-v5")
    path = parser.parse_args().model
    try:
        script = importlib.import_module(
            torch.load(path, map_location="cpu", weights_only=True)["script"]
        )
        policy, args = load_policy(script, path, ENV_ID)
    except Exception as error:  # torch.load alone raises half a dozen kinds
        parser.error(f"cannot read {path} ({type(error).__name__})")
    if args.env_id != ENV_ID:
        parser.error(f"{path} was trained on {args.env_id}, not on {ENV_ID}")
    envs = [script.make_env(ENV_ID) for _ in range(20)]
    episodes = script.play_episodes(envs, policy, list(range(10**9, 10**9 + 20)))
    members, times = torch.meshgrid(*map(torch.arange, episodes.mask.shape[1:]), indexing="ij")
    member, t = episodes.flatten(members[None]), episodes.flatten(times[None])  # of each step
    for i, rewards in enumerate(episodes.rewards[0]):
        pitch = episodes.obs[(member == i) & (t >= 500), 1].mean()
        print(f"return {rewards.sum():.0f}, pitch {pitch:.1f}")


if __name__ == "__main__":
    main()
