"""How a policy trained on HalfCheetah-v5 or Hopper-v5 moves: 20 greedy episodes, one a line.

    python docs/benchmark/gait.py runs/RUN/model.pt

Each line has an episode's return, its steps, the metres from x = 0 where it ended, and the torso's
mean pitch, the second number of an observation, over the episode's second half, in radians. For the
cheetah 0 is on its feet, π on its back. The episodes are the first 20 of the script's own
evaluation.
"""

import argparse
import importlib
import sys
from pathlib import Path

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
        env_id = states["args"]["env_id"]
        if env_id in ENV_IDS:
            script = importlib.import_module(states["script"])
            policy, args = load_policy(script, path)
    except Exception as error:  # torch.load alone raises half a dozen kinds
        parser.error(f"cannot read {path} ({type(error).__name__})")
    if env_id not in ENV_IDS:
        parser.error(f"{path} was trained on {env_id}, not on {' or '.join(ENV_IDS)}")
    torch.set_num_threads(1)  # as in the scripts: another order of sums is another episode
    envs = [script.make_env(args) for _ in range(20)]
    first = script.Run.EVAL_SEED
    rewards = [[] for _ in envs]
    pitches = [[] for _ in envs]
    for members, obs, _, paid, *_ in script.play(envs, policy, range(first, first + len(envs))):
        for member, pitch, reward in zip(members, obs[:, 1], paid):
            rewards[member].append(reward)
            pitches[member].append(pitch)
    for env, paid, pitch in zip(envs, rewards, pitches):
        steps = len(paid)
        metres = env.unwrapped.data.qpos[0]
        mean_pitch = sum(pitch[steps // 2 :]) / (steps - steps // 2)
        print(f"return {sum(paid):.0f}, {steps} steps, {metres:.1f} m, pitch {mean_pitch:.1f}")


if __name__ == "__main__":
    main()
