"""The variance of gradients with each baseline, by docs/examples/luck.py.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/variances.py

Measures a new policy of each environment, and one that grpo_rtg.py has trained for 50,000 steps.
Two tuning seeds, 512 episodes each. What is in results/variances.csv is not measured again.
"""

import os
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pool

import run
import studies

sys.path.insert(0, str(run.ROOT))
import grpo_rtg
from docs.examples import luck

VALUES = ["seed_share", "predicted", "single", "critic"]
COLUMNS = ["env", "variant", "seed", *VALUES, "commit", "versions"]
PATH = run.RESULTS / "variances.csv"
luck.NUM_EPISODES = 512


def measured(env_id: str, stage: str, seed: str) -> dict:
    """A row of the CSV."""
    norm_obs = env_id in studies.LUCK or env_id.endswith("-v5")
    args = grpo_rtg.Args(env_id=env_id, seed=int(seed), norm_obs=norm_obs, total_timesteps=50_000)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if stage != "new":
            args.evaluate = str(grpo_rtg.train(args).dir / "checkpoint.pt")
        values = luck.measure(args)
        os.chdir(run.ROOT)
    texts = [" ".join(f"{x:.3g}" for x in values[name]) for name in VALUES]
    about = [run.commit("docs/examples/luck.py"), run.versions()]
    return dict(zip(COLUMNS, [env_id, stage, seed, *texts, *about]))


def main() -> None:
    seeds = [str(seed) for seed in studies.TUNING_SEEDS[:2]]
    stages = ("new", "50k")
    keys = [(env_id, stage, seed) for seed in seeds for env_id in studies.ENVS for stage in stages]
    todo = [key for key in keys if key not in run.read(PATH)]
    with Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        ends = [pool.apply_async(measured, key) for key in todo]
        for key, end in zip(todo, ends):
            with suppress(grpo_rtg.UserError):  # all groups tie
                run.write(PATH, run.read(PATH) | {key: end.get()}, COLUMNS)


if __name__ == "__main__":
    main()
