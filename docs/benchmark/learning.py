"""Train one script over several seeds, as a user runs it, and print a row of README's learning table.

    python docs/benchmark/learning.py --seeds 1-10 --reach 475 -- grpo_rtg.py --env-id CartPole-v1

Each seed is a process of its own with one thread; what is read is what the script prints. The row gives the median and
the range over seeds of: mean return of the last 100 training episodes, mean return of the greedy evaluation, steps
taken, seconds of training, steps per second and their share of the environment's own speed (stepped at random on one
core, measured just before). --by train counts the seeds by training return instead of greedy evaluation.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import gymnasium as gym

ROOT = Path(__file__).parents[2]
PRINTED = {
    "train": r"Training return, last 100 episodes: (\S+)",
    "greedy": r"Greedy evaluation, \d+ episodes: return (\S+)",
    "steps": r"Trained ([\d,]+) steps",
    "seconds": r"steps in ([\d.]+) s",
    "rate": r"\(([\d,]+) steps/s\)",
}


def run(command: list[str], seed: int, folder: str) -> dict[str, float]:
    """Train with one seed; the figures that the script printed."""
    script = [sys.executable, str(ROOT / command[0]), *command[1:], "--seed", str(seed), "--no-save-model"]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(script)} ended with status {done.returncode}:\n{done.stderr}")
    return {name: float(re.search(text, done.stdout)[1].replace(",", "")) for name, text in PRINTED.items()}


def own_rate(env_id: str, seconds: float = 3.0) -> float:
    """Steps per second of the environment alone, with random actions drawn beforehand, resets included."""
    env = gym.make(env_id)
    actions = [env.action_space.sample() for _ in range(1000)]
    env.reset(seed=0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        steps += len(actions)
    return steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side; more than one slows each down")
    parser.add_argument("--reach", type=float, help="count the seeds that reach this return")
    parser.add_argument("--by", choices=("greedy", "train"), default="greedy")
    parser.add_argument("command", nargs="+", help="-- script.py and its options")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    env_id = args.command[args.command.index("--env-id") + 1] if "--env-id" in args.command else "CartPole-v1"
    own = own_rate(env_id)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda seed: run(args.command, seed, folder), range(first, last + 1)))

    def cell(name: str, digits: int) -> str:
        values = [result[name] for result in results]
        return f"{median(values):,.{digits}f} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"

    share = median(result["rate"] for result in results) / own
    cells = [
        cell("train", 1),
        cell("greedy", 1),
        cell("steps", 0),
        cell("seconds", 1),
        f"{cell('rate', 0)}, {share:.0%}",
    ]
    if args.reach is not None:
        reached = sum(result[args.by] >= args.reach for result in results)
        cells.append(f"{reached} of {len(results)} at {args.reach:g} ({args.by})")
    print(f"| `{' '.join(args.command)}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
