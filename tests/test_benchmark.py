"""docs/benchmark: rows are what the scripts did, a finished run is not repeated, a replay runs the
commit that a row names, statistics and tables are those worked by hand.
"""

import argparse
import csv
import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
    command = f"grpo_outcome.py --env-id CartPole-v1 --total-timesteps 2500 {FLAGS} --seed 7"
    assert last["command"] == command and last["commit"] and "torch 2" in last["versions"]
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
    monkeypatch.setattr(run, "execute", lambda job: executed.append(job) or made(run, job))
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    over = (*JOB[:4], "grpo_rtg.py", "--baseline neighbors")
    monkeypatch.setattr(studies, "STUDIES", {"small": lambda: [JOB, over]})
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


@pytest.fixture
def boxes(load, monkeypatch, tmp_path):
    """The module with a CSV in the test's folder and CartPole only, for 5,000 steps."""
    module = load("boxes")
    monkeypatch.setattr(module, "CSV", tmp_path / "results" / "boxes.csv")
    small = module.Environment(5000, 20, "ppo.py --env-id CartPole-v1")
    monkeypatch.setattr(module, "ENVIRONMENTS", {"CartPole-v1": small})
    return module


@pytest.mark.slow
def test_a_run_fills_its_row_and_is_not_repeated(boxes, monkeypatch):
    pytest.importorskip("stable_baselines3")
    jobs = [boxes.Job("CartPole-v1", x, 1) for x in ("grpo_rtg.py", "ppo.py", boxes.RL_ZOO)]
    assert boxes.run_missing(jobs, boxes.CSV, 1) is None
    rows = {entry: row for (_, entry, _), row in boxes.read().items()}
    for entry in ("grpo_rtg", "ppo"):  # the same run in this process
        module, row = importlib.import_module(entry), rows[f"{entry}.py"]
        ended = module.train(module.Args(seed=1, total_timesteps=5000))
        assert float(row["training"]) == pytest.approx(ended["train_return"], abs=1e-3)
        assert float(row["greedy"]) == pytest.approx(ended["eval_returns"].mean(), abs=1e-3)
        assert int(row["steps"]) == ended["steps"] <= 5000
    row, curve = rows[boxes.RL_ZOO], json.loads(rows[boxes.RL_ZOO]["curve"])
    assert int(row["steps"]) == 5120 and int(row["reach_steps"]) == curve[0][0]
    monkeypatch.setattr(boxes, "execute", lambda job, *_: pytest.fail(str(job)))
    boxes.run_missing(jobs, boxes.CSV, 1)


def test_a_return_is_reached_when_the_mean_of_100_episodes_is(boxes):
    meter = boxes.Meter(10, 1000, 0)
    meter.start()
    meter.add([1000.0] * 50 + [5.0] * 49, 150)  # a mean of 99 does not count
    assert meter.reached == (None, None) and meter.curve == []
    meter.add([5.0], 200)
    meter.add([5.0], 210)  # in the same 50th of the budget
    meter.add([5.0], 221)
    assert meter.reached[0] == 200 and meter.curve[0][2] == 502.5
    assert [step for step, *_ in meter.curve] == [200, 221]


def row_of(boxes, entry, seed, **figures) -> dict:
    """A row as it is read from the CSV."""
    job = boxes.Job("CartPole-v1", entry, seed)
    numbers = dict.fromkeys(boxes.NUMBERS, "") | {"seconds": 9, "peak": 250}
    row = numbers | {"command": job.command, "curve": "[]"} | figures
    return {job.key: {name: str(value) for name, value in row.items()}}


def test_the_tables_of_boxes_and_defaults(load, boxes, monkeypatch):
    rows = row_of(boxes, boxes.SB3, 1, greedy=7)
    rows |= row_of(boxes, "ppo.py", 1, greedy=400, reach_steps=1000, reach_seconds=3, seconds=11)
    rows |= row_of(boxes, "ppo.py", 2, greedy=500, reach_steps=2000, reach_seconds=5)
    rows |= row_of(boxes, "ppo.py", 3, greedy=410, seconds=10)
    rows |= row_of(boxes, "ppo.py", 4, greedy=1, seconds=20)
    row = "| ppo.py | 405.0 [1.0, 500.0] | – | 50% | 1,500 [1,000, 2,000] | 4.0 [3.0, 5.0] "
    assert row + "| 10 [9, 20] | – | 250 [250, 250] | 4 |" in boxes.table(rows)
    head, _, *lines = boxes.overview(rows).splitlines()
    assert "CartPole-v1<br>5,000 steps<br>threshold 20 |" in head
    assert lines == [
        "| `ppo.py` | 405<br>3 of 4<br>> 7.5 s | > 7.5 |",  # of 3, 5, and the whole 10 and 20 s
        f"| {boxes.SB3} | 7<br>0 of 1<br>> 9.0 s | > 9.0 |",
    ]
    defaults = load("defaults")
    monkeypatch.setattr(defaults, "ENVIRONMENTS", ["CartPole-v1"])
    first, second = defaults.candidates()[:2]
    rows = row_of(boxes, first, 101, greedy=-9, reach_seconds=4)
    rows |= row_of(boxes, first, 102, greedy=-9)  # never: all its 9 s count, √(4·9) = 6
    rows |= row_of(boxes, second, 101, greedy=99, reach_seconds=2)
    _, _, best, worse = defaults.table(rows).splitlines()
    assert best == f"| {defaults.name(second)} | 2.0 | 2.0, 99, 1 of 1 |"
    assert worse == f"| {defaults.name(first)} | 6.0 | 6.0, -9, 0 of 2 |"
