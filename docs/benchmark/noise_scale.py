"""How many episodes a gradient needs with each baseline, by docs/examples/luck.py.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/noise_scale.py

Measures a new policy of each environment, and one that grpo_rtg.py has trained for 50,000 steps,
with three tuning seeds. What is in results/noise_scale.csv is not measured again.
"""

import os
import sys
import tempfile
from dataclasses import replace
from multiprocessing import Pool

import run
import studies

sys.path.insert(0, str(run.ROOT))
import grpo_rtg
from docs.examples import luck

VALUES = ["seed_share", "predicted", "shared", "single", "critic"]
COLUMNS = ["env", "variant", "seed", *VALUES, "commit", "versions"]
PATH = run.RESULTS / "noise_scale.csv"


def measured(env_id: str, seed: int) -> dict[tuple, dict]:
    """A row for the new policy, and one for the trained one."""
    norm_obs = env_id in studies.LUCK or env_id.endswith("-v5")
    args = grpo_rtg.Args(env_id=env_id, seed=seed, norm_obs=norm_obs, total_timesteps=50_000)
    found = {"new": luck.measure(args)}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path = grpo_rtg.train(args).dir / "checkpoint.pt"
        found["50k"] = luck.measure(replace(args, evaluate=str(path)))
        os.chdir(run.ROOT)
    about = [run.commit("docs/examples/luck.py"), run.versions()]
    rows = {}
    for stage, values in found.items():
        key = (env_id, stage, str(seed))
        texts = [" ".join(f"{x:.3g}" for x in values[name]) for name in VALUES]
        rows[key] = dict(zip(COLUMNS, [*key, *texts, *about]))
    return rows


def main() -> None:
    jobs = [(env_id, seed) for seed in studies.TUNING_SEEDS[:3] for env_id in studies.ENVS]
    known = run.read(PATH)
    todo = [(env_id, seed) for env_id, seed in jobs if (env_id, "50k", str(seed)) not in known]
    with Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        ends = [pool.apply_async(measured, job) for job in todo]
        for end in ends:
            run.write(PATH, run.read(PATH) | end.get(), COLUMNS)


if __name__ == "__main__":
    main()
