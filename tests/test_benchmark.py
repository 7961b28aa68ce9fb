"""docs/benchmark: rows are what the scripts did, a finished run is not repeated, a replay runs the
commit that a row names, and statistics are those worked by hand.
"""

import argparse
import csv
import importlib
import json
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"
FLAGS = "--num-groups 1 --group-size 4 --update-epochs 2 --learning-rate 1e-9"
JOB = "CartPole-v1", "outcome", 7, 2500, "grpo_outcome.py", FLAGS


@pytest.fixture
def load(monkeypatch):
    """A module of docs/benchmark by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.slow
def test_the_rows_are_what_the_script_gives(load):
    run = load("run")
    *curve, last = run.execute(run.Job(*JOB))
    assert [row["step"] for row in curve] == list(range(100, 2501, 100))
    assert all(1 <= float(row["eval_return"]) <= 500 for row in curve[10:])
    assert (
        last["command"]
        == f"grpo_outcome.py --env-id CartPole-v1 --total-timesteps 2500 {FLAGS} --seed 7"
    )
    assert last["commit"] and "torch 2" in last["versions"]
    module = load("grpo_outcome")  # the same flags in this process
    args = module.Args(seed=7, total_timesteps=2500, num_groups=1, group_size=4)
    summary = module.train(replace(args, update_epochs=2, learning_rate=1e-9))
    assert float(last["greedy"]) == pytest.approx(summary["eval_returns"].mean(), rel=1e-5)
    assert float(last["train_return"]) == pytest.approx(summary["train_return"], abs=0.01)
    policy, args = run.load_policy(module, summary["run_dir"] / "model.pt")
    sampled = module.evaluate(policy, replace(args, greedy=False), 10**9).mean()
    assert float(last["sampled"]) == pytest.approx(sampled, rel=1e-5)
    with pytest.raises(RuntimeError, match="--group-size must be from 2"):
        run.execute(run.Job(*JOB[:5], "--group-size 1"))


def made(run, job, **last) -> list[dict]:
    """Rows of a run as they are read from a CSV."""
    key = {"env": job.env, "variant": job.variant, "seed": str(job.seed)}
    end = {"step": "2400", "train_return": "9.5", "greedy": "8", "sampled": "7", "seconds": "3"}
    end |= {"command": job.command, "commit": "c", "versions": "numpy 2"} | last
    rows = [key | {"step": "100", "eval_return": "5"}, key | end]
    return [{name: row.get(name, "") for name in run.COLUMNS} for row in rows]


def test_a_study_is_resumed_and_changed_flags_are_run_again(load, monkeypatch, tmp_path):
    run, studies = load("run"), load("studies")
    executed = []

    class Pool:  # in this process
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, function, job):
            executed.append(job)
            future = Future()
            future.set_result(made(run, job))
            return future

    over = (*JOB[:4], "grpo_rtg.py", "--baseline neighbors")
    monkeypatch.setattr(studies, "STUDIES", {"small": lambda: [JOB, over]})
    monkeypatch.setattr(run, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path.parent)  # for the path that it prints
    monkeypatch.setattr(sys, "argv", ["run.py", "small"])
    run.main()
    run.main()
    path = tmp_path / "small.csv"
    assert executed == [run.Job(*JOB)] and len(list(csv.DictReader(path.open()))) == 2
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))  # the power failed before the last row
    run.main()
    assert len(executed) == 2
    changed = (*JOB[:5], f"{FLAGS} --gamma 0.9")
    monkeypatch.setattr(studies, "STUDIES", {"small": lambda: [changed]})
    run.main()
    run.main()
    assert len(executed) == 3 and len(run.read(path)) == 1


OLD_RUN = """
import os
from dataclasses import dataclass
@dataclass
class Job:
    env: str; variant: str; seed: int; steps: int; script: str; flags: str; curve: bool
def execute(job):
    key = {"env": job.env, "variant": job.variant, "seed": job.seed}
    command = f"{job.script} --env-id {job.env} --total-timesteps {job.steps} {job.flags}"
    end = {"step": 2400, "train_return": "9.5", "greedy": os.environ.get("OPENBLAS_CORETYPE", "8")}
    end |= {"sampled": "7", "command": f"{command} --seed {job.seed}"}
    return [key | {"step": 100, "eval_return": "5"}, key | end]
"""


def test_a_replay_runs_the_commit_that_a_row_names(load, monkeypatch, tmp_path, capsys):
    """A commit's own run.py says what came out; the tree beside it says something else."""
    run = load("run")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "docs/benchmark").mkdir(parents=True)
    old = tmp_path / "docs/benchmark/run.py"
    old.write_text(OLD_RUN)
    run.git("init", "-q")
    run.git("add", ".")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    run.git(*who, "commit", "-qm", "old")
    commit = run.git("rev-parse", "--short", "HEAD")
    old.write_text("raise SystemExit(1)")
    jobs = [run.Job(*JOB[:2], seed, *JOB[3:]) for seed in range(1, 6)]
    lasts = [{}, {"versions": "OpenBLAS Haswell", "greedy": "Haswell"}, {"greedy": "6"}]
    lasts += [{"commit": f"{commit}+", "train_return": "7"}, {"versions": "OpenBLAS None"}]
    table = {job.key: made(run, job, **{"commit": commit} | last) for job, last in zip(jobs, lasts)}
    args = argparse.Namespace(replay=5, seed=1, seconds=3, jobs=1)
    monkeypatch.setattr(
        run, "MULTIPLY", "import os; exit(os.environ['OPENBLAS_CORETYPE'] == 'None')"
    )
    assert run.replay(table, args)
    ends = sorted(capsys.readouterr().out.splitlines()[:-1])
    assert [end.partition(": ")[2].partition(": (")[0] for end in ends] == [
        "as in the CSV",
        "as in the CSV",
        "as in the CSV, but not its curve or evaluations",
        "not comparable: a file differed from the commit",
        "not comparable: this processor has no OpenBLAS None",
    ]
    table[jobs[0].key][-1]["train_return"] = "7"
    assert not run.replay(table, args)
    assert "otherwise: ('2400', '9.5') instead of ('2400', '7')" in capsys.readouterr().out
    args.seconds = 2  # no run is as short
    assert run.replay(table, args) and len(run.git("worktree", "list").splitlines()) == 1


def test_statistics_of_the_report(load):
    """Against numbers worked by hand."""
    pytest.importorskip("matplotlib"), pytest.importorskip("scipy")
    report = load("report")
    assert report.pooled_iqm(np.arange(8.0)) == 3.5  # of 2, 3, 4, 5
    of = np.array([0.0, 1]), np.arange(4.0)
    assert report.pooled_iqm(*of) == 0.75  # of 0 0 1 1 and 0 1 2 3: of 0, 1, 1, 1
    assert report.improvement(np.array([1.0, 2]), np.array([1.0, 1])) == 0.75  # a tie is half
    of = map(np.array, ([2.0], [0.0, 1], [1.0], [0.5]))
    assert report.improvement(*of) == 0.75  # 1 there, 0.5 here
    assert report.interval([np.full(3, 7.0)], report.iqm) == (7, 7, 7)
    runs = {"PPO: a": [9], "PPO: b": [2, 4], "PPO: c": [1, 1]}  # b, c: the best of a first round
    runs = {
        name: [[{"greedy": x, "sampled": x, "command": ""}] for x in values]
        for name, values in runs.items()
    }
    row = report.tuning_table({"Hopper-v5": runs}).splitlines()[-1]
    assert row == "| Hopper-v5 | PPO | b | 3 | 1* (c), 9 (a) |"
    runs = {"outcome: tuned": [1] * 5, "return-to-go: tuned": [2] * 6, "outcome: γ = 0.9": [3] * 4}
    runs = {
        name: [[{"greedy": x, "train_return": x}] for x in values] for name, values in runs.items()
    }
    table = report.ablation_table({"HalfCheetah-v5": runs})
    row = "| HalfCheetah-v5, 250,000, 5 to 6 | tuned | 1 [1, 1] | 1 [1, 1] "
    assert row + "| 2 [2, 2] | 2 [2, 2] | – | – |" in table and "3 [" not in table  # 4 are few
    ranked, studies = report.ranked(report.load("tuning")), report.studies
    assert set(ranked) == {(env, variant) for env in studies.STEPS for variant in studies.VARIANTS}
    assert all(best[2] for best, *_ in ranked.values())  # the tuned flags won


@pytest.mark.slow
def test_the_parts_of_a_step_are_the_whole(load):
    flags = ["--env-id", "Pendulum-v1", "--num-groups", "1", "--total-timesteps", "3300"]
    job = {"what": ["parts", "grpo_rtg"], "flags": flags, "spawned": 0}
    command = [sys.executable, FOLDER / "speed.py", "one", json.dumps(job)]
    result = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    parts = [result[part] for part in load("speed").PARTS]
    assert min(parts) > 0 and sum(parts) == pytest.approx(result["total"])
    assert 0 < result["dropped"] < result["total"]  # the last rollout, that of the steps left over


@pytest.mark.slow
def test_gait_plays_the_episodes_of_the_evaluation(load, capsys, monkeypatch):
    pytest.importorskip("mujoco")
    script = load("grpo_rtg")
    args = script.Args(env_id="Hopper-v5", total_timesteps=2000, eval_episodes=20)
    summary = script.train(args)
    monkeypatch.setattr(sys, "argv", ["gait.py", str(Path(summary["run_dir"], "model.pt"))])
    capsys.readouterr()
    load("gait").main()
    lines = capsys.readouterr().out.splitlines()
    returns = [float(line.split()[1].strip(",")) for line in lines]
    assert returns == pytest.approx(summary["eval_returns"], abs=0.51)
    assert all(abs(float(line.split()[-1])) < 1 for line in lines)
