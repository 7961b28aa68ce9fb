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
    texts = {name: " ".join(f"{x:.3g}" for x in found) for name, found in values.items()}
    about = {"commit": run.git("rev-parse", "--short", "HEAD"), "versions": run.versions()}
    return {"env": env_id, "variant": stage, "seed": seed} | texts | about


def main() -> None:
    seeds = [str(seed) for seed in studies.TUNING_SEEDS[:2]]
    stages = ("new", "50k")
    keys = [(env_id, stage, seed) for seed in seeds for env_id in studies.ENVS for stage in stages]
    todo = [key for key in keys if key not in studies.read("variances")]
    with Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for end in [pool.apply_async(measured, key) for key in todo]:
            with suppress(grpo_rtg.UserError):  # all groups tie
                run.add("variances", end.get())


if __name__ == "__main__":
    main()
