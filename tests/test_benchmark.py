"""docs/benchmark/run.py: what it writes is what the scripts did, and a finished run is not
repeated.
"""

import argparse
import csv
import importlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"
JOB = (
    "CartPole-v1",
    "outcome",
    7,
    2500,
    "grpo_outcome.py",
    "--num-groups 1 --group-size 4 --num-minibatches 2",
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("run")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(importlib.import_module("studies"), "STUDIES", {"small": lambda: [JOB]})
    monkeypatch.setattr(module, "ROOT", tmp_path.parent)  # for the path that it prints
    return module


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("run")
    sys.path.remove(str(FOLDER))
    return module.execute(module.Job(*JOB))


def test_rows_of_a_run_are_its_curve_and_its_end(rows):
    *curve, last = rows
    assert [row["step"] for row in curve] == list(range(100, 2501, 100))
    assert all(1 <= float(row["eval_return"]) <= 500 for row in curve)
    assert 8 <= float(curve[-1]["train_return"]) <= 500 and "greedy" not in curve[-1]
    assert 2000 < last["step"] <= 2500
    assert last["command"] == (
        "grpo_outcome.py --env-id CartPole-v1 --total-timesteps 2500 "
        "--num-groups 1 --group-size 4 --num-minibatches 2 --seed 7"
    )
    assert last["seconds"] and last["commit"]
    assert re.search(r"torch 2.*, OpenBLAS \w+$", last["versions"])


def test_the_rows_are_what_the_script_gives(rows):
    """The same flags in this process: returns after training, greedy and sampled, and of the last
    training episodes.
    """
    module = importlib.import_module("grpo_outcome")
    options = {"num_groups": 1, "group_size": 4, "num_minibatches": 2, "eval_episodes": 100}
    args = module.Args(seed=7, total_timesteps=2500, **options)
    summary = module.train(args)
    assert float(rows[-1]["greedy"]) == pytest.approx(summary["eval_returns"].mean(), rel=1e-5)
    assert float(rows[-1]["train_return"]) == pytest.approx(summary["train_return"], abs=0.01)
    env = module.make_env(args.env_id)
    policy = module.Policy(env.observation_space, env.action_space)
    _, states = module.load(summary["run_dir"] / "model.pt", "")
    policy.load_state_dict(states["policy"])
    sampled = module.evaluate(policy, replace(args, greedy=False)).mean()
    assert float(rows[-1]["sampled"]) == pytest.approx(sampled, rel=1e-5)


def test_a_study_is_resumed_and_changed_flags_are_run_again(
    run, rows, monkeypatch, tmp_path, capsys
):
    executed = []

    class Pool:  # in this process
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, function, job):
            executed.append(job)
            future = importlib.import_module("concurrent.futures").Future()
            last = rows[-1] | {"command": job.command}
            future.set_result([*map(dict, rows[:-1]), last])
            return future

    monkeypatch.setattr(run, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(sys, "argv", ["run.py", "small"])
    run.main()
    run.main()
    assert len(executed) == 1
    with open(tmp_path / "small.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) and table[-1]["greedy"] == rows[-1]["greedy"]

    lines = Path(tmp_path / "small.csv").read_text().splitlines()
    # the power failed before the last row
    Path(tmp_path / "small.csv").write_text("\n".join(lines[:-1]))
    run.main()
    assert len(executed) == 2

    changed = (*JOB[:5], JOB[5] + " --gamma 0.9")
    monkeypatch.setattr(importlib.import_module("studies"), "STUDIES", {"small": lambda: [changed]})
    run.main()
    run.main()
    assert len(executed) == 3 and len(run.read(tmp_path / "small.csv")) == 1


def test_a_replay_says_what_ends_as_in_the_csv(run, rows, monkeypatch, capsys):
    monkeypatch.setattr(run, "ProcessPoolExecutor", Threads)
    job, args = run.Job(*JOB), argparse.Namespace(replay=1, seed=1, seconds=1e9, jobs=1)
    args.against = None
    table = {job.key: [{name: str(row.get(name, "")) for name in run.COLUMNS} for row in rows]}
    new = [dict(row) for row in rows]
    monkeypatch.setattr(run, "execute", lambda job: new)
    assert run.replay([job], table, args)
    assert "Of 1 runs end 1 as in the CSV" in capsys.readouterr().out
    new[3]["eval_return"] = "7"
    assert run.replay([job], table, args)
    assert "1 as in the CSV, but not its curve or evaluations" in capsys.readouterr().out
    new[-1]["train_return"] = "7.25"
    assert not run.replay([job], table, args)
    assert re.search(r"outcome 7: otherwise: .* '7.25'\) instead of", capsys.readouterr().out)
    args.against = "elsewhere"
    monkeypatch.setattr(run, "ended", lambda job, checkout: (str(new[-1]["step"]), "7.25"))
    assert run.replay([job], table, args)
    assert "1 as with elsewhere, not as in the CSV" in capsys.readouterr().out
    args.seconds = 0  # no run is as short
    assert run.replay([job], table, args) and "Of 0 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "study", ["main", "ablations", "tuning", "choices", "neighbors", "norm_obs", "first_std"]
)
def test_every_row_names_its_kernel(run, study):
    runs = run.read(FOLDER / "results" / f"{study}.csv")
    assert {run.kernel_of(rows) for rows in runs.values()} <= {"Haswell", "SkylakeX"} and runs


def test_a_replay_rounds_as_each_row_did(run, rows, monkeypatch):
    """Each run starts with the kernel of OpenBLAS that its row names."""
    monkeypatch.setattr(run, "ProcessPoolExecutor", Threads)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "as it was")
    table, kernels = {}, {}
    for seed, kernel in (1, "Haswell"), (2, "SkylakeX"), (3, "Haswell"):
        last = rows[-1] | {"versions": f"numpy 2.4.6, OpenBLAS {kernel}"}
        last["command"] = run.Job(*JOB[:2], seed, *JOB[3:]).command
        table[*JOB[:2], str(seed)] = [{name: str(last.get(name, "")) for name in run.COLUMNS}]

    def execute(job):
        kernels[job.seed] = os.environ["OPENBLAS_CORETYPE"]
        return table[job.key]

    monkeypatch.setattr(run, "execute", execute)
    args = argparse.Namespace(replay=3, seed=1, seconds=1e9, jobs=1, against=None)
    assert run.replay([run.Job(*JOB[:2], seed, *JOB[3:]) for seed in (1, 2, 3)], table, args)
    assert kernels == {1: "Haswell", 2: "SkylakeX", 3: "Haswell"}


def test_the_end_of_a_run_of_another_checkout(run, rows):
    end = run.ended(run.Job(*JOB), child.ROOT)
    assert end == (str(rows[-1]["step"]), rows[-1]["train_return"])


class Threads(ThreadPoolExecutor):
    """A pool in this process, so that what a test has replaced is replaced there."""

    def __init__(self, workers, mp_context):
        super().__init__(workers)


def test_a_run_that_fails_says_why(run):
    with pytest.raises(RuntimeError, match="--group-size must be from 2"):
        importlib.reload(run).execute(run.Job(*JOB[:5], "--group-size 1"))


def test_a_jobs_policy_is_that_of_the_script_that_trains(run):
    assert run.Job(*JOB).trained == "grpo_outcome.py"
    program = "docs/benchmark/first_std.py", "--script ppo.py --log-std -2"
    assert run.Job(*JOB[:4], *program).trained == "ppo.py"


@pytest.mark.slow
def test_a_change_of_the_environment_is_evaluated_there(run, monkeypatch):
    job = importlib.reload(run).Job(
        *JOB[:5], f"{JOB[5]} --env-id docs.examples.grid_world:GridWorld-v0", False
    )
    assert job.env == "CartPole-v1" and -5 <= float(run.execute(job)[-1]["greedy"]) <= 0.9
    monkeypatch.setattr(run.Job, "env_id", "")
    with pytest.raises(
        RuntimeError,
        match="trained, but could not be evaluated: .* if you trust it, add that as --env-id",
    ):
        run.execute(job)


def test_learning_prints_a_row_of_readmes_table():
    flags = [
        "--total-timesteps",
        "3000",
        "--num-groups",
        "1",
        "--group-size",
        "4",
        "--num-minibatches",
        "2",
    ]
    command = [
        sys.executable,
        FOLDER / "learning.py",
        "--seeds",
        "1-2",
        "--jobs",
        "2",
        "--reach",
        "0",
        "--",
    ]
    done = subprocess.run(
        [*command, "grpo_outcome.py", *flags], capture_output=True, text=True, check=True
    )
    number = r"-?[\d,]+(?:\.\d)?"
    cell = rf"{number} \[{number}, {number}\]"
    assert re.fullmatch(
        rf"\| `grpo_outcome.py .*` \| {cell} \| {cell} \| {cell} \| 2 of 2 at 0 \(greedy\) \|\n",
        done.stdout,
    )


def test_speed_knows_the_tables_of_its_page():
    """That it starts, and has the tables that docs/performance.md names. They take minutes to
    hours.
    """
    done = subprocess.run(
        [sys.executable, FOLDER / "speed.py", "--help"], capture_output=True, text=True, check=True
    )
    named = re.findall(
        r"python docs/benchmark/speed\.py (\w+)", (FOLDER.parent / "performance.md").read_text()
    )
    assert len(named) >= 4 and all(
        f"{table}," in done.stdout or f"{table}}}" in done.stdout for table in named
    )


def test_the_parts_of_a_step_are_the_whole(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed

    flags = {"env-id": "Pendulum-v1", "num-groups": 1, "group-size": 4, "total-timesteps": 1200}
    flags = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    job = {"what": ["parts", "grpo_rtg"], "flags": flags, "spawned": 0}
    command = [sys.executable, FOLDER / "speed.py", "one", json.dumps(job)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    parts = [result[part] for part in speed.PARTS]
    assert min(parts) > 0  # were the 200 steps of the evaluation counted, one would not be
    assert sum(parts) == pytest.approx(result["total"]) == 1e6 / result["rate"]
    assert 0 < result["dropped"] < result["total"]  # the last rollout, that of the steps left over


def test_speed_on_a_gpu(monkeypatch, capsys):
    """Without one, a sentence and status 2; with one, what runs with and without --cuda gave, side
    by side.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed

    def run(what, flags, env_id):
        return {
            "rate": 300.0 if "--cuda" in flags else 100.0,
            "rollout": 0.5,
            "update": 0.25,
            "gpu_peak": 8.0,
        }

    monkeypatch.setattr(speed, "run", run)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        speed.gpu(None)
    assert capsys.readouterr() == ("", "speed.py: torch finds no GPU.\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "A GPU")
    speed.gpu(None)
    rows = capsys.readouterr().out.splitlines()
    cells = "100 [100, 100] | 300 [300, 300] | 3.00 [3.00, 3.00] | 50 / 25 / 25% | 8.0 [8.0, 8.0] |"
    assert (
        rows[0] == "A GPU, one thread of the CPU"
        and f"| 1024 | 64 | {cells}" in rows
        and len(rows) == 4 + 3 * 4
    )


def test_settings_that_equal_the_tuned_ones_are_not_run_again(monkeypatch):
    """CartPole's outcome supervision is tuned to one group of 16 and γ = 0.99."""
    monkeypatch.syspath_prepend(str(child.ROOT / "docs/benchmark"))
    import studies

    for change, same in {
        "--group-size 16 --num-groups 1": True,
        "--gamma 0.990": True,
        "--gamma 0.9": False,
        "--group-size 8 --num-groups 1": False,
        "--no-seed-groups": False,
        "--loss-agg trajectory": False,
    }.items():
        assert studies.changes_nothing("CartPole-v1", "outcome", change) is same, change
    names = {
        name
        for env, name, *_ in studies.ablations()
        if env == "CartPole-v1" and name.startswith("outcome")
    }
    assert {
        "outcome: tuned",
        "outcome: unseeded",
    } <= names and "outcome: G = 16, K = 1" not in names


def test_own_luck_shares_the_start_and_nothing_else():
    pytest.importorskip("Box2D")
    env_id = "docs.benchmark.own_luck:LunarLanderOwnLuck-v3"
    one, other = gym.make(env_id), gym.make(env_id)
    for seed in (3, 4):
        (start, _), (other_start, _) = (env.reset(seed=seed) for env in (one, other))
        assert np.array_equal(start, other_start)
    assert not np.array_equal(start, one.reset(seed=3)[0])
    one.reset(seed=4)
    main_engine = [env.step(2)[0] for env in (one, other)]
    assert not np.array_equal(*main_engine)


class Places(gym.Wrapper):
    """Where each step of the environment ends, by its own account."""

    def step(self, action):
        result = self.env.step(action)
        self.places.append(result[-1]["x_position"])
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_rtg", "ppo"])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5"])
def test_gait_plays_the_episodes_of_the_evaluation(name, env_id, tmp_path, capsys, monkeypatch):
    pytest.importorskip("mujoco")
    script, gait = importlib.import_module(name), importlib.import_module("docs.benchmark.gait")
    args, env = script.Args(env_id=env_id, hidden_size=8, eval_episodes=20), gym.make(env_id)
    network = script.ActorCritic if name == "ppo" else script.Policy
    policy = network(env.observation_space, env.action_space, args.hidden_size)
    script.save(tmp_path / "model.pt", args, policy=policy.state_dict())
    monkeypatch.setattr(sys, "argv", ["gait.py", str(tmp_path / "model.pt")])
    returns, play, make_env = script.evaluate(policy, args), script.play_episodes, script.make_env
    envs = []

    def with_places(*given):
        envs.append(Places(make_env(*given)))
        envs[-1].places = []
        return envs[-1]

    def pitched(*given):  # at step t by t
        episodes = play(*given)
        t = torch.arange(episodes.mask.shape[-1]).expand(episodes.mask.shape)
        episodes.obs[:, 1] = episodes.flatten(t)
        return episodes

    monkeypatch.setattr(script, "make_env", with_places)
    monkeypatch.setattr(script, "play_episodes", pitched)
    gait.main()
    expected = []
    for returned, env in zip(returns, envs[-20:]):
        steps = len(env.places)
        middle = (steps // 2 + steps - 1) / 2  # of the second half's steps
        line = f"return {returned:.0f}, {steps} steps, {env.places[-1]:.1f} m, pitch {middle:.1f}"
        expected.append(line)
    assert capsys.readouterr().out.splitlines()[1:] == expected  # less what evaluate prints
    env.reset(seed=1)
    assert env.step(env.action_space.sample())[0][1] == env.unwrapped.data.qpos[2]


def test_statistics_of_the_report(monkeypatch):
    """Against numbers worked by hand."""
    pytest.importorskip("matplotlib"), pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(FOLDER))
    report = importlib.import_module("report")
    assert report.pooled_iqm(np.arange(8.0)) == 3.5  # of 2, 3, 4, 5
    of = np.array([0.0, 1]), np.arange(4.0)
    assert report.pooled_iqm(*of) == 0.75  # of 0 0 1 1 and 0 1 2 3: of 0, 1, 1, 1
    assert report.improvement(np.array([1.0, 2]), np.array([1.0, 1])) == 0.75  # a tie is half
    of = map(np.array, ([2.0], [0.0, 1], [1.0], [0.5]))
    assert report.improvement(*of) == 0.75  # 1 there, 0.5 here
    assert report.interval([np.full(3, 7.0)], report.iqm) == (7, 7, 7)
    runs = {
        "PPO: a": [9],
        "PPO: b": [2, 4],
        "PPO: c": [1, 1],
    }  # b and c were the best of a first round
    runs = {
        name: [[{"greedy": x, "sampled": x, "command": ""}] for x in values]
        for name, values in runs.items()
    }
    assert (
        report.tuning_table({"Hopper-v5": runs}).splitlines()[-1]
        == "| Hopper-v5 | PPO | b | 3 | 1* (c), 9 (a) |"
    )
    runs = {
        "outcome: tuned": [1] * 5,
        "return-to-go: tuned": [2] * 6,
        "outcome: γ = 0.9": [3] * 4,
    }  # four are too few
    runs = {
        name: [[{"greedy": x, "train_return": x}] for x in values] for name, values in runs.items()
    }
    row = "| HalfCheetah-v5, 250,000, 5 to 6 | tuned | 1 [1, 1] | 1 [1, 1] "
    row += "| 2 [2, 2] | 2 [2, 2] | – | – |"
    assert row in report.ablation_table(
        {"HalfCheetah-v5": runs}
    ) and "3 [" not in report.ablation_table({"HalfCheetah-v5": runs})
    better, worse = [[{"greedy": 2, "train_return": 6}]], [[{"greedy": 1, "train_return": 7}]]
    table = {"here": dict.fromkeys(report.studies.VARIANTS, better) | {"PPO": worse}}
    assert report.improvement_table(table).splitlines()[-1] == "| here |" + " 1.00 | 0.00 |" * 5
    monkeypatch.setattr(
        report,
        "load",
        lambda _: {env: {"return-to-go, timestep": [*better, *worse]} for env in halves},
    )
    runs = [[{"greedy": 3, "train_return": 8}]]
    halves = {"Acrobot-v1": {"with": runs}, "Hopper-v5": {"without": runs}}
    rows = report.norm_obs_table(halves).splitlines()
    assert rows[0].count("without") == 2 and rows[0].index("without") < rows[0].index("with |")
    cells = "2.0 [2.0, 2.0] | 3.0 [3.0, 3.0] | 6.0 [6.0, 6.0] | 8.0 [8.0, 8.0]"
    assert rows[2] == f"| Acrobot-v1 | {cells} | 1 |"
    assert rows[3] == "| Hopper-v5 | 3 [3, 3] | 2 [2, 2] | 8 [8, 8] | 6 [6, 6] | 1 |"
    changed = {"Hopper-v5": {"return-to-go, timestep": runs}}
    *_, row = report.short(report.first_std_table(changed)).splitlines()
    assert row == "| Hopper-v5 | timestep | 2 [2, 2] | 3 [3, 3] | 6 [6, 6] | 8 [8, 8] | 1 |"


@pytest.mark.parametrize("script", ["grpo_outcome", "grpo_process", "grpo_rtg", "ppo"])
def test_a_run_with_another_first_std(script, cli, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module, saved = importlib.import_module(script), []
    for name in ("Policy", "ActorCritic"):
        if hasattr(module, name):  # which it changes
            monkeypatch.setattr(getattr(module, name), "__init__", getattr(module, name).__init__)
    for log_std in ("-2", "0"):
        args = ["--log-std", log_std, "--script", f"{script}.py", *child.TINY[script]]
        args += ["--env-id", "Pendulum-v1", "--learning-rate", 1e-9]
        status, _, err = cli("first_std", *args)
        assert status == 0, err
        _, states = module.load(max(Path("runs").glob("*/model.pt"), key=os.path.getmtime), "")
        saved.append(states["policy"])
    assert saved[0]["log_std"].tolist() == pytest.approx([-2], abs=1e-4)
    assert saved[1]["log_std"].tolist() == pytest.approx([0], abs=1e-4)
    del saved[0]["log_std"], saved[1]["log_std"]
    torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-4)  # the same luck


def test_tuned_flags_are_those_that_won_their_tuning(monkeypatch):
    pytest.importorskip("matplotlib"), pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(FOLDER))
    report, studies = importlib.import_module("report"), importlib.import_module("studies")
    ranked = report.ranked(report.load("tuning"))
    assert set(ranked) == {(env, variant) for env in studies.STEPS for variant in studies.VARIANTS}
    for key, [(_, _, taken, _), *_] in ranked.items():  # the best, of equals the one taken
        assert taken, key


def test_random_policy(monkeypatch):
    """A random policy's episodes can be had again, one by one, and its figures are there for every
    environment.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    random_policy, studies = (
        importlib.import_module("random_policy"),
        importlib.import_module("studies"),
    )
    returns = random_policy.random_returns("CartPole-v1", 30)
    assert (returns[:10] == random_policy.random_returns("CartPole-v1", 10)).all()
    assert 15 < returns.mean() < 30 and np.ptp(returns) > 0
    assert set(random_policy.read()) == set(studies.STEPS)
