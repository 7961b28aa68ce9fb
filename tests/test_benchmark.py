"""docs/benchmark: rows are what the scripts did, a finished run is not repeated, a replay runs the
commit that a row names, statistics and tables are those worked by hand.
"""

import csv
import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"
FLAGS = "--num-groups 1 --group-size 4 --update-epochs 2 --learning-rate 1e-9"
COMMAND = f"grpo_outcome.py --env-id CartPole-v1 --total-timesteps 2500 {FLAGS} --seed 7"
JOB = "CartPole-v1", "outcome", 7, COMMAND


@pytest.fixture
def load(monkeypatch):
    """A module of docs/benchmark by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.slow
def test_a_row_is_what_the_script_gives(load):
    run = load("run")
    row = run.execute(run.Job(*JOB))
    curve = [float(value) for value in row["curve"].split()]
    assert len(curve) == 25 and all(1 <= value <= 500 for value in curve[10:])
    assert row["command"] == COMMAND and row["commit"] and "torch 2" in row["versions"]
    module = load("grpo_outcome")  # the same flags in this process
    args = module.Args(seed=7, total_timesteps=2500, num_groups=1, group_size=4)
    summary = module.train(replace(args, update_epochs=2, learning_rate=1e-9))
    assert row["steps"] == summary["step"]
    assert float(row["greedy"]) == pytest.approx(np.mean(summary["eval_returns"]), rel=1e-5)
    assert float(row["train_return"]) == pytest.approx(summary["train_return"], rel=1e-5)
    assert row["sampled"] != row["greedy"]
    row = run.execute(run.Job(*JOB[:3], COMMAND.replace("size 4", "size 1")))
    assert "UserError: --group-size must be at least 2" in row["error"]


@pytest.mark.slow
def test_other_baselines_in_place_of_the_regression(load):
    run = load("run")
    rows = []
    for script in ("docs/examples/critic.py", "docs/examples/gpg.py", "grpo_rtg.py"):
        flags = "--total-timesteps 12000 --learning-rate 3e-3"
        command = f"{script} --env-id CartPole-v1 {flags} --seed 3"
        rows.append(run.execute(run.Job("CartPole-v1", "critic", 3, command)))
        assert float(rows[-1]["sampled"]) > 100
    assert len({row["sampled"] for row in rows}) == 3


def made(run, job, **change) -> dict:
    """A row as it is read from a CSV."""
    row = {"env": job.env, "variant": job.variant, "seed": str(job.seed), "command": job.command}
    row |= {"steps": "2400", "greedy": "8", "sampled": "7", "train_return": "9.5", "seconds": "3"}
    row |= {"commit": "c", "versions": run.versions(), "curve": "1 2"}
    return row | change


def test_a_study_is_resumed_and_changed_flags_are_run_again(load, monkeypatch, tmp_path):
    run = load("run")
    studies = load("studies")
    executed = []

    def run_all(jobs, path, processes):
        executed.extend(jobs)
        rows = {job.key: made(run, job) for job in jobs}
        run.write(path, run.read(path) | rows)

    monkeypatch.setattr(run, "run_all", run_all)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "ladder"])
    changed = *JOB[:3], COMMAND.replace("1e-9", "1e-8")
    for jobs, number in (([JOB], 1), ([JOB], 1), ([changed], 2), ([changed], 2)):
        monkeypatch.setitem(studies.STUDIES, "ladder", lambda jobs=jobs: jobs)
        run.main()
        assert len(executed) == number
    [row] = csv.DictReader((tmp_path / "ladder.csv").open())
    assert row["command"] == changed[3]


@pytest.mark.slow
def test_runs_side_by_side_fill_one_csv(load, tmp_path):
    run = load("run")
    wrong = COMMAND.replace("size 4", "size 1")
    jobs = [run.Job(*JOB[:2], seed, COMMAND if seed else wrong) for seed in range(3)]
    assert run.run_all(jobs, tmp_path / "small.csv", 2) == 1
    rows = run.read(tmp_path / "small.csv")
    assert sorted(seed for _, _, seed in rows) == ["1", "2"]


OLD_RUN = """
import os
from dataclasses import dataclass
@dataclass
class Job:
    env: str; variant: str; seed: int; command: str
def execute(job):
    return {"steps": 2400, "greedy": "8", "sampled": "7", "train_return": "9.5", "curve": "1 2"}
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
    job = run.Job(*JOB)
    changes = [{}, {"commit": f"{commit}+", "greedy": "6"}, {"versions": "torch 1"}]
    rows = [made(run, job, **{"commit": commit} | change) for change in changes]
    assert run.replay(rows, 1)
    ends = capsys.readouterr().out.splitlines()
    assert ends[0].endswith(f"({commit}): as in the CSV")
    assert ends[1].endswith("not comparable: the script differed from the commit")
    assert ends[2].endswith("not comparable: made with torch 1")
    assert ends[3] == "1 of 3 rows end as in the CSV."
    for name in ("steps", "greedy", "sampled", "train_return", "curve"):
        assert not run.replay([rows[0] | {name: "3"}], 1)
    assert len(run.git("worktree", "list").splitlines()) == 1


def test_normalized_rewards(load, monkeypatch):
    """Against a scalar loop: the variance of discounted returns, which end with their episode."""
    ppo = load("ppo")
    monkeypatch.setattr(ppo, "collect_steps", ppo.collect_steps)  # the import replaces it
    module = load("normalized_ppo")
    rewards = [1.0, 2.0, 3.0, 4.0]
    done = torch.tensor([[False], [True], [False], [False]])
    blank = torch.zeros(4, 1)
    steps = ppo.Steps(blank, blank, torch.tensor(rewards)[:, None], blank, done, done, [3.0], [2.0])
    monkeypatch.setattr(module, "plain", lambda *_: steps)
    found = module.collect_steps(SimpleNamespace(envs=[None]), None, 4, None)
    sums = [1.0, 0.99 + 2, 3.0, 0.99 * 3 + 4]
    for t in range(4):
        spread = np.std(sums[: t + 1])
        if t > 0:  # the statistics begin with a weight of 1e-4 on a mean of 0
            assert found.rewards[t].item() == pytest.approx(rewards[t] / spread, rel=1e-2)
    assert found.episode_returns == [3.0]


def test_statistics_of_the_report(load):
    """Against numbers worked by hand."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    report = load("report")
    assert report.pooled_iqm(np.arange(8.0)) == 3.5  # of 2, 3, 4, 5
    of = np.array([0.0, 1]), np.arange(4.0)
    assert report.pooled_iqm(*of) == 0.75  # of 0 0 1 1 and 0 1 2 3: of 0, 1, 1, 1
    assert report.improvement(np.array([1.0, 2]), np.array([1.0, 1])) == 0.75  # a tie is half
    of = map(np.array, ([2.0], [0.0, 1], [1.0], [0.5]))
    assert report.improvement(*of) == 0.75  # 1 there, 0.5 here
    near = np.array([1.0]), np.array([0.991])
    assert report.improvement(*near) == 0.5  # as good as equal
    assert report.gain(*map(np.array, ([2.0], [4.0], [1.0], [3.0]))) == 1  # 3 instead of 2
    assert report.interval([np.full(3, 7.0)], report.iqm) == (7, 7, 7)


def test_tables_of_the_report(load, monkeypatch, tmp_path):
    """An environment is shown where all rungs have enough seeds, and of each as many."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    run = load("run")
    report = load("report")
    rows = {}
    enough = report.ENOUGH
    for job in (run.Job(*job) for job in report.studies.ladder()):
        seeds = enough + (job.variant == "outcome")
        if job.seed <= seeds and job.env in ("CartPole-v1", "Pendulum-v1"):
            if (job.env, job.variant, job.seed) == ("Pendulum-v1", "PPO", enough):
                continue
            greedy = 475.0 if job.seed <= enough else 0.0
            rows[job.key] = made(run, job, greedy=str(greedy), curve="1 " * 25)
    run.write(tmp_path / "ladder.csv", rows)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    head, _, *lines = report.ladder_table().splitlines()
    assert head.startswith("|  | outcome |") and lines == ["| CartPole |" + " 1.00 |" * 8]
    same = "1.00 [1.00, 1.00] | "
    assert f"| outcome | {3 * same}-0.05 [-0.05, -0.05] |" in report.overall_table()
    assert f"| `group` |{4 * ' 0.00 [0.00, 0.00] |'}" in report.gains_table()
    assert f"| `group` |{3 * ' 0.50 [0.50, 0.50] |'}" in report.beats_table()
    page = "a\n<!-- table ladder -->\nold\n<!-- end -->\n<!-- table other -->\nb\n<!-- end -->"
    assert report.with_tables(page).endswith("<!-- table other -->\nb\n<!-- end -->")
    assert lines[0] in report.with_tables(page)


def test_gains_without_mountain_car(load, monkeypatch):
    """Where it alone is won by the second rung, nothing is gained without it."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    report = load("report")
    table = {}
    for env, won in (("CartPole-v1", "475"), ("MountainCarContinuous-v0", "90")):
        row = {"greedy": won, "curve": f"{won} {won}"}
        table[env] = {rung: [row] for rung in report.studies.RUNGS}
    lost = {"greedy": f"{report.RANDOM[env]}", "curve": f"{report.RANDOM[env]}"}
    table[env]["outcome"] = [lost]
    monkeypatch.setattr(report, "load_ladder", lambda: table)
    cells = report.gains_table().splitlines()[2].split(" | ")
    gains = [float(cell.split()[0]) for cell in cells[1:]]
    assert gains == [0.5, 0, 0.5, 0]  # IQM of 0 and 1 instead of 1 and 1


@pytest.mark.slow
def test_the_parts_of_a_step(load):
    """Those of a rollout and of an update are within them; the whole lacks the last rollout."""
    speed = load("speed")
    collect = load("grpo_rtg").collect_groups
    spent = speed.train_timed(["--env-id", "Pendulum-v1", "--total-timesteps", "3300"])
    rollout, step, act, fit, batch, update, loss, backward, adam, whole = spent.values()
    assert min(spent.values()) > 0
    assert step + act < rollout and loss + backward + adam < update
    assert fit + batch + update < whole
    assert load("grpo_rtg").collect_groups is collect  # the timers are gone


@pytest.fixture
def boxes(load, monkeypatch):
    """The module with CartPole only, for 5,000 steps."""
    module = load("boxes")
    small = module.Environment(5000, 20, "ppo.py --env-id CartPole-v1")
    monkeypatch.setattr(module, "ENVIRONMENTS", {"CartPole-v1": small})
    return module


@pytest.mark.slow
def test_a_run_of_boxes_fills_its_row(boxes, load):
    pytest.importorskip("stable_baselines3")
    run = load("run")
    jobs = [run.Job(*job) for job in boxes.jobs(1, 1)]
    rows = {job.variant: boxes.execute(job) for job in jobs if job.variant != boxes.SB3}
    for script in boxes.SCRIPTS:  # the same run in this process
        module, row = importlib.import_module(script.removesuffix(".py")), rows[script]
        ended = module.train(module.Args(seed=1, total_timesteps=5000))
        assert row["training"] == pytest.approx(ended["train_return"], abs=1e-3)
        assert row["greedy"] == pytest.approx(np.mean(ended["eval_returns"]), abs=1e-3)
        assert row["steps"] == ended["step"] <= 5000
    row = rows[boxes.RL_ZOO]
    assert row["steps"] == 5120 and 0 < row["reach_steps"] < 5120
    assert 0 < row["reach_seconds"] < row["seconds"] and row["peak"] > 100
    assert "CLEANRL" in rows["CleanRL ppo.py"]["error"]  # which says what it lacks


def test_a_return_is_reached_when_the_mean_of_100_episodes_is(boxes):
    meter = boxes.Meter({"threshold": 10, "spawned": 0})
    meter.start()
    meter.add([1000.0] * 50 + [5.0] * 49, 150)  # a mean of 99 does not count
    assert meter.reached == (None, None)
    meter.add([5.0], 200)
    meter.add([5.0], 210)
    assert meter.reached[0] == 200
    assert meter.result()["training"] == pytest.approx((49 * 1000 + 51 * 5) / 100)


def row_of(boxes, entry, seed, **figures) -> dict:
    """A row as it is read from the CSV."""
    row = dict.fromkeys(boxes.COLUMNS, "")
    row |= {"steps": 4990, "seconds": 9, "peak": 250, "start_up": 2}
    row |= {"env": "CartPole-v1", "variant": entry, "seed": seed} | figures
    row["command"] = boxes.command("CartPole-v1", entry, seed)
    return {("CartPole-v1", entry, str(seed)): {name: str(value) for name, value in row.items()}}


def test_the_tables_of_boxes(boxes, load, monkeypatch, tmp_path):
    """Three runs of four are above the threshold at the end, and reached it while training."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    run = load("run")
    report = load("report")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    rows = row_of(boxes, boxes.RL_ZOO, 1, greedy=7)
    rows |= row_of(boxes, "grpo_rtg.py", 1, greedy=20, reach_steps=2000)
    rows |= row_of(boxes, "ppo.py", 1, greedy=400, reach_steps=3000, reach_seconds=4)
    rows |= row_of(boxes, "ppo.py", 2, greedy=500, reach_steps=4000, reach_seconds=6)
    rows |= row_of(boxes, "ppo.py", 3, greedy=410, reach_steps=1000, reach_seconds=6)
    rows |= row_of(boxes, "ppo.py", 4, greedy=1)
    run.write(tmp_path / "boxes.csv", rows, boxes.COLUMNS)
    head, _, rtg, ours, others = report.boxes_table().splitlines()
    assert head == "|  | CartPole 5k, 20 |"
    assert rtg == "| `grpo_rtg.py` | 20, 1 of 1, 2k |"
    assert ours == "| `ppo.py` | 405, 3 of 4, 4k |"  # of 1, 3, 4, never
    assert others == f"| {boxes.RL_ZOO} | 7, 0 of 1, > 5k |"
    rows = {key: row for key, row in rows.items() if key[2] != "4"}  # of "seconds" three
    run.write(tmp_path / "seconds.csv", rows, boxes.COLUMNS)
    *_, rtg, ours, others = report.seconds_table().splitlines()
    assert rtg == "| `grpo_rtg.py` | > 9 | 2.0 | 250 |"
    assert ours == "| `ppo.py` | 6 | 2.0 | 250 |"  # of 4, 6, 6
    assert report.steps_table().endswith(
        "| CartPole, 20 | 2k, > 9 s | 4k, 6 s | – | > 5k, > 9 s | – |"
    )
    assert report.defaults_table().endswith("| CartPole, 5,000 | 20 | 1 of 1 | 20 | 3 of 4 | 405 |")
