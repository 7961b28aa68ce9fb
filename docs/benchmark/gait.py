"""How a policy trained on HalfCheetah-v5 or Hopper-v5 moves: 20 greedy episodes, one a line.

    python docs/benchmark/gait.py runs/RUN/model.pt

Each line has an episode's return, its steps, the metres from x = 0 where it ended, and the torso's
mean pitch, the second number of an observation, over the episode's second half, in radians. For the
cheetah 0 is on its feet, π on its back. The episodes are the first 20 of the script's own
evaluation.
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

ENV_IDS = "HalfCheetah-v5", "Hopper-v5"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the model.pt of a run on one of the two")
    path = parser.parse_args().model
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
        script, env_id = states["script"], states["args"]["env_id"]
        if env_id in ENV_IDS:
            script = importlib.import_module(script)
            policy, _ = load_policy(script, path, env_id)
    except Exception as error:  # torch.load alone raises half a dozen kinds
        parser.error(f"cannot read {path} ({type(error).__name__})")
    if env_id not in ENV_IDS:
        parser.error(f"{path} was trained on {env_id}, not on {' or '.join(ENV_IDS)}")
    envs = [script.make_env(env_id) for _ in range(20)]
    episodes = script.play_episodes(envs, policy, list(range(10**9, 10**9 + 20)))
    members, times = torch.meshgrid(*map(torch.arange, episodes.mask.shape[1:]), indexing="ij")
    member, t = episodes.flatten(members[None]), episodes.flatten(times[None])  # of each step
    for i, (env, rewards) in enumerate(zip(envs, episodes.rewards[0])):
        steps, metres = episodes.mask[0, i].sum(), env.unwrapped.data.qpos[0]
        pitch = episodes.obs[(member == i) & (t >= steps // 2), 1].mean()
        print(f"return {rewards.sum():.0f}, {steps} steps, {metres:.1f} m, pitch {pitch:.1f}")


if __name__ == "__main__":
    main()
