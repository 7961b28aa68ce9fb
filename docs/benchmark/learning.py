"""Train one script over several seeds, as a user runs it, and print a row of README's learning
table.

    python docs/benchmark/learning.py --seeds 1-10 --reach 475 -- grpo_rtg.py --env-id CartPole-v1

Each seed is a process of its own with one thread; what is read is what the script prints. The row
gives the median and the range over seeds of: mean return of the last 100 training episodes, mean
return of the greedy evaluation, steps taken. --by train counts the seeds by training return instead
of greedy evaluation. speed.py is about speed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PRINTED = {
    "train": r"Training return, last 100 episodes: (\S+)",
    "greedy": r"Greedy evaluation, \d+ episodes: return (\S+)",
    "steps": r"Trained ([\d,]+) steps",
}


def run(command: list[str], seed: int, folder: str) -> dict[str, float]:
    """Train with one seed; the figures that the script printed."""
    script = [sys.executable, str(ROOT / command[0]), *command[1:], "--seed", str(seed)]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(script)} ended with status {done.returncode}:\n{done.stderr}"
        )
    return {
        name: float(re.findall(text, done.stdout)[-1].replace(",", ""))
        for name, text in PRINTED.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes side by side; more than one slows each down"
    )
    parser.add_argument("--reach", type=float, help="count the seeds that reach this return")
    parser.add_argument("--by", choices=("greedy", "train"), default="greedy")
    parser.add_argument("command", nargs="+", help="-- script.py and its options")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        results = list(
            pool.map(lambda seed: run(args.command, seed, folder), range(first, last + 1))
        )

    def cell(name: str, digits: int) -> str:
        values = [result[name] for result in results]
        digits += digits and max(map(abs, values)) < 10  # one more for small returns
        return (
            f"{median(values):,.{digits}f} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"
        )

    cells = [cell("train", 1), cell("greedy", 1), cell("steps", 0)]
    if args.reach is not None:
        reached = sum(result[args.by] >= args.reach for result in results)
        cells.append(f"{reached} of {len(results)} at {args.reach:g} ({args.by})")
    print(f"| `{' '.join(args.command)}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
