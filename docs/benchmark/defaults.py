"""Which defaults learn: candidates for each script's on CartPole, Acrobot, Pendulum and
LunarLander, by one number.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/defaults.py                     # all, one after the other: hours
    python docs/benchmark/defaults.py --only "ppo.* 101$"
    python docs/benchmark/defaults.py --table             # of what has been run

The number is the geometric mean over the four environments of the seconds until the mean return of
the last 100 training episodes is the threshold of boxes.py, which measures them; a run that does
not get there counts with its whole time. A candidate is a script with all the flags that may become
its defaults, discount and clip included. The seeds are those of tuning, which no result uses; the
runs are in results/defaults.csv.
"""

import argparse
import re
import sys
from math import prod
from statistics import median

import boxes
import studies

CSV = boxes.CSV.with_name("defaults.csv")
ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3")


def candidates() -> list[str]:
    """Scripts with their flags."""
    grpo = studies.grpo
    ppo = studies.ppo
    rtg = "grpo_rtg.py --gamma 0.99 --baseline timestep"
    gae = "ppo.py --gamma 0.99 --clip-coef 0.2"
    return [
        f"{rtg} {grpo(4, 4, 8, 4, 3e-3)}",
        f"grpo_rtg.py --gamma 0.99 --baseline neighbors {grpo(4, 4, 8, 4, 3e-3)}",
        f"{rtg} {grpo(4, 4, 4, 4, 3e-3)}",
        f"{rtg} {grpo(2, 8, 8, 4, 3e-3)}",
        f"{rtg} {grpo(4, 4, 8, 4, 5e-3)}",
        f"{rtg} {grpo(2, 4, 8, 4, 3e-3)}",
        f"{rtg} {grpo(2, 8, 4, 4, 3e-3)}",
        f"{rtg} {grpo(1, 16, 8, 4, 3e-3)}",
        f"{rtg} {grpo(4, 8, 8, 4, 3e-3)}",
        f"{rtg} {grpo(2, 8, 8, 4, 2e-3)}",
        f"{rtg} {grpo(4, 4, 8, 4, 2e-3)}",
        f"{rtg} {grpo(8, 4, 8, 8, 3e-3)}",
        f"{rtg} {grpo(4, 8, 8, 8, 3e-3)}",
        f"{rtg} {grpo(4, 8, 8, 8, 4e-3)}",
        f"{rtg} {grpo(4, 8, 8, 16, 3e-3)}",
        f"{rtg} {grpo(4, 8, 8, 8, 5e-3)}",
        f"{rtg} {grpo(4, 6, 8, 8, 3e-3)}",
        f"{rtg} {grpo(2, 16, 8, 8, 3e-3)}",
        f"{rtg} {grpo(4, 4, 8, 4, 3e-3)} --target-kl 0.03",
        f"{rtg} {grpo(4, 4, 4, 8, 3e-3)}",
        f"{gae} {ppo(8, 256, 10, 16, 1e-3, 0.95)}",
        f"{gae} {ppo(8, 256, 10, 16, 1e-3, 0.98)}",
        f"{gae} {ppo(8, 256, 10, 8, 1e-3, 0.95)}",
        f"{gae} {ppo(16, 256, 10, 16, 1e-3, 0.98)}",
        f"{gae} {ppo(16, 256, 10, 8, 2e-3, 0.98)}",
        f"{gae} {ppo(16, 256, 10, 16, 1e-3, 0.98)} --ent-coef 0.01",
        *(f"grpo_outcome.py --gamma {g} {grpo(4, 4, 8, 4, 3e-3)}" for g in (1.0, 0.99)),
        f"grpo_outcome.py --gamma 1.0 {grpo(4, 8, 8, 8, 5e-3)}",
        f"grpo_outcome.py --gamma 1.0 {grpo(1, 16, 4, 4, 1e-3)}",
        f"grpo_outcome.py --gamma 0.99 {grpo(2, 16, 8, 8, 1e-3)}",
        *(f"grpo_process.py --gamma {g} {grpo(4, 4, 8, 4, 3e-3)}" for g in (1.0, 0.99)),
        *(f"grpo_process.py --gamma {g} {grpo(4, 8, 8, 8, 5e-3)}" for g in (1.0, 0.99)),
        f"grpo_process.py --gamma 1.0 {grpo(1, 16, 4, 4, 1e-3)}",
        f"grpo_process.py --gamma 0.99 {grpo(2, 16, 4, 8, 5e-4)}",
    ]


def name(entry: str) -> str:
    """A candidate in short: groups x size, passes:minibatches, learning rate, what else is said."""
    said = dict(re.findall(r"--(\S+) (\S+)", entry.replace("num-envs", "num-groups")))
    said |= {"group-size": said.pop("num-steps")} if "num-steps" in said else {}
    shape = "{num-groups}x{group-size} {update-epochs}:{num-minibatches} {learning-rate}"
    more = {"baseline": "", "gae-lambda": "λ ", "ent-coef": "entropy ", "target-kl": "KL below "}
    words = [more[flag] + said[flag] for flag in more if flag in said]
    words += [f"γ {said['gamma']}"] * (entry.split("_")[0] == "grpo" and "baseline" not in said)
    return ", ".join([f"`{entry.split()[0]}` {shape.format(**said)}", *words])


def table(rows: dict[tuple, dict]) -> str:
    """In Markdown, each script's best first: seconds to the threshold, median greedy return, how
    many runs end greedily above the threshold.
    """
    found = []
    for entry in candidates():
        cells, times = [], []
        for env in ENVIRONMENTS:
            runs = [
                {column: float(row[column]) if row[column] else None for column in boxes.NUMBERS}
                for (of, x, seed), row in rows.items()
                if (of, x) == (env, entry)
                and row["command"] == boxes.Job(env, entry, int(seed)).command
            ]
            if not runs:
                break
            seconds = [run["reach_seconds"] or run["seconds"] for run in runs]
            reached = sum(run["greedy"] >= boxes.ENVIRONMENTS[env].threshold for run in runs)
            times.append(prod(seconds) ** (1 / len(seconds)))
            greedy = median(run["greedy"] for run in runs)
            cells.append(f"{times[-1]:.1f}, {greedy:.0f}, {reached} of {len(runs)}")
        else:
            found.append((prod(times) ** (1 / len(times)), entry, cells))
    head = f"| | seconds | {' | '.join(ENVIRONMENTS)} |\n" + "|-" * 6 + "|"
    found.sort(key=lambda line: (line[1].split()[0], line[0]))
    lines = [f"| {name(x)} | {mean:.1f} | {' | '.join(cells)} |" for mean, x, cells in found]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=boxes.first_to_last, default="101-105", help="first-last or one"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side slow each other")
    parser.add_argument(
        "--only", default="", help="regular expression that 'environment flags seed' must match"
    )
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    args = parser.parse_args()
    jobs = [boxes.Job(env, x, n) for n in args.seeds for x in candidates() for env in ENVIRONMENTS]
    jobs = [job for job in jobs if re.search(args.only, " ".join(job.key))]
    jobs = [job for job in jobs if not studies.is_over(job.command)]
    failed = None if args.table else boxes.run_missing(jobs, CSV, args.jobs)
    print(table(boxes.read(CSV)))
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
