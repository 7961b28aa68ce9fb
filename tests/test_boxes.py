"""docs/benchmark/boxes.py: its rows are what the programs did, and a run is not repeated."""

import importlib
import json
import sys

import pytest

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"


@pytest.fixture
def whole(monkeypatch, tmp_path):
    """The module, with a CSV in the test's folder."""
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("boxes")
    monkeypatch.setattr(module, "CSV", tmp_path / "results" / "boxes.csv")
    return module


@pytest.fixture
def boxes(whole, monkeypatch):
    """The module with CartPole only, for 3,000 steps."""
    small = whole.Environment(3000, 20, "ppo.py --env-id CartPole-v1")
    monkeypatch.setattr(whole, "ENVIRONMENTS", {"CartPole-v1": small})
    return whole


@pytest.fixture
def call(whole, monkeypatch, capsys):
    """Its main with these arguments; exit status, standard output, standard error."""

    def main(*args):
        monkeypatch.setattr(sys, "argv", ["boxes.py", *map(str, args)])
        try:
            whole.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return main


@pytest.mark.slow
def test_a_run_fills_its_row_and_is_not_repeated(boxes, call, monkeypatch):
    pytest.importorskip("stable_baselines3")
    longer = boxes.ENVIRONMENTS["CartPole-v1"]._replace(steps=5000)
    boxes.ENVIRONMENTS["CartPole-v1"] = longer  # one iteration of ppo.py
    only = "rtg|e-v1 ppo|Zoo"
    status, table, _ = call("--seeds", "1-1", "--only", only, "--jobs", 3)
    assert status == 0 and table.count("\n| ") == 1 + 3
    rows = {entry: row for (_, entry, _), row in boxes.read().items()}
    assert set(rows) == {"grpo_rtg.py", "ppo.py", boxes.RL_ZOO}
    for row in rows.values():
        assert all(row[name] for name in boxes.COLUMNS if not name.startswith("reach"))
        assert 8 <= float(row["training"]) <= 500 and 8 <= float(row["greedy"]) <= 500
        assert float(row["peak"]) > 100 and float(row["start_up"]) > 0.1
        assert "torch 2" in row["versions"] and row["seed"] == "1"
    for entry in ("grpo_rtg", "ppo"):  # the same run in this process
        module, row = importlib.import_module(entry), rows[f"{entry}.py"]
        ended = module.train(module.Args(seed=1, total_timesteps=5000))
        assert float(row["training"]) == pytest.approx(ended["train_return"], abs=1e-3)
        assert float(row["greedy"]) == pytest.approx(ended["eval_returns"].mean(), abs=1e-3)
        assert int(row["steps"]) == ended["steps"] <= 5000
    row = rows[boxes.RL_ZOO]
    curve = json.loads(row["curve"])
    assert int(row["steps"]) == 5120 and int(row["reach_steps"]) == curve[0][0]  # 20 is soon there
    assert 0 < float(row["reach_seconds"]) <= curve[-1][1] <= float(row["seconds"])

    monkeypatch.setattr(boxes, "execute", lambda job, *_: pytest.fail(str(job)))
    call("--table")  # and what was printed until here
    _, again, said = call("--seeds", "1", "--only", only)
    assert again == table == call("--table")[1] and "3 of 3 runs are in boxes.csv" in said


def test_a_changed_command_and_a_missing_seed_are_run(boxes, call, monkeypatch):
    ran = []

    def execute(job, *_):
        if job.seed == 3:
            raise RuntimeError("it burns")
        ran.append(job)
        return handmade(boxes, *job.key)

    monkeypatch.setattr(boxes, "execute", execute)
    assert call("--seeds", "1-2", "--only", "outcome")[0] == 0
    assert [job.seed for job in ran] == [1, 2]
    status, _, said = call("--seeds", "1-3", "--only", "outcome")
    assert status == "1 of 1 runs failed." and "it burns" in said and len(ran) == 2
    small = boxes.ENVIRONMENTS["CartPole-v1"]._replace(flags=" --gamma 0.9")
    monkeypatch.setitem(boxes.ENVIRONMENTS, "CartPole-v1", small)
    assert boxes.table(boxes.read()) == ""  # what was run is no run of today's command
    call("--seeds", "1-2", "--only", "outcome")
    assert len(ran) == 4 and len(boxes.read()) == 2


def test_turns_and_commands(whole, call, monkeypatch):
    """A seed after the other, in it the environments, in them the entries, each as it is typed."""
    ran = []

    def execute(job, *_):
        ran.append(job)
        return handmade(whole, *job.key)

    monkeypatch.setattr(whole, "execute", execute)
    call("--seeds", "3-4")
    assert len(ran) == 2 * 6 * 6 and [job.seed for job in ran] == [3] * 36 + [4] * 36
    assert [job.env for job in ran[:36:6]] == list(whole.ENVIRONMENTS)
    assert [job.entry for job in ran[:6]] == whole.entries("CartPole-v1")[:6]
    envs = whole.ENVIRONMENTS
    commands = [whole.Job(env, x, 3).command for env in envs for x in whole.entries(env)]
    for command in (
        "grpo_rtg.py --env-id CartPole-v1 --total-timesteps 200000 --seed 3",
        "ppo.py --env-id Hopper-v5 --total-timesteps 1000000 --seed 3 --norm-obs",
        "SB3 PPO --env-id Pendulum-v1 --total-timesteps 500000 --seed 3 {}",
        "ppo.py --env-id LunarLander-v2 --total-timesteps 1000000 --seed 3",
    ):
        assert command in commands
    assert set(whole.ZOO) == set(whole.ENVIRONMENTS)


def test_a_return_is_reached_when_the_mean_of_100_episodes_is(boxes):
    meter = boxes.Meter(10, 1000, 0)
    meter.start()
    meter.add([1000.0] * 50 + [5.0] * 49, 150)  # a mean of 99 does not count
    assert meter.reached == (None, None) and meter.curve == []
    meter.add([], 190)
    meter.add([5.0], 200)
    assert meter.reached[0] == 200 and meter.reached[1] > 0
    meter.add([5.0], 210)  # in the same 50th of the budget
    meter.add([5.0], 221)
    assert [step for step, *_ in meter.curve] == [200, 221]
    assert meter.curve[0][2] == 502.5 and meter.reached[0] == 200
    assert meter.result()["steps"] == 221


def test_a_return_that_is_not_reached_leaves_its_cells_empty(boxes):
    meter = boxes.Meter(10, 1000, 0)
    meter.start()
    meter.add([9.0] * 100, 100)
    meter.add([99.0] * 100 + [9.0] * 100, 400)  # they end together: the last 100 count
    meter.add([99.0], 401)
    assert meter.result()["reach_steps"] is None and meter.result()["training"] == 9.9
    meter.add([19.0], 402)
    assert meter.result()["reach_steps"] == 402  # exactly 10
    assert set(meter.result()) == {*boxes.NUMBERS, "curve"} - {"greedy"}


def test_sb3_is_evaluated_with_the_statistics_of_its_training(boxes, monkeypatch):
    """RL-Zoo's settings for Hopper normalize observations and rewards."""
    pytest.importorskip("stable_baselines3"), pytest.importorskip("mujoco")
    seen = {}

    def evaluate_policy(model, env, episodes, deterministic):
        trained = model.get_vec_normalize_env()
        assert env.obs_rms is trained.obs_rms and trained.training and trained.gamma == 0.999
        assert not env.training and not env.norm_reward and deterministic and episodes == 100
        seen.update(lr=model.learning_rate, width=model.policy.net_arch["pi"])
        return 1.5, 0.0

    monkeypatch.setattr("stable_baselines3.common.evaluation.evaluate_policy", evaluate_policy)
    monkeypatch.setattr(boxes.speed, "Meter", lambda spawned: boxes.Meter(9, 512, spawned))
    job = {"env": "Hopper-v5", "entry": boxes.RL_ZOO, "seed": 1, "steps": 512, "spawned": 0}
    result = boxes.run_sb3(job)
    assert result["greedy"] == 1.5 and result["steps"] == 512
    assert 1 < result["training"] < 100  # a normalized one is smaller
    assert seen == {"lr": 9.80828e-05, "width": [256, 256]}


PRINTS = """
for step in range(150):
    print(f"global_step={10 * (step + 1)}, episodic_return=[{-200.5 + step}]")
"""


def test_cleanrl_is_read_from_what_it_prints(boxes, call, tmp_path):
    script = tmp_path / "cleanrl" / "ppo.py"
    script.parent.mkdir()
    given = ["--seeds", "1-1", "--only", "CleanRL"]
    assert call(*given)[0] == 2
    status, _, said = call(*given, "--cleanrl", tmp_path)
    assert status == 2 and said.endswith(f"There is no {script}.\n")
    script.write_text("")
    status, _, said = call(*given, "--cleanrl", tmp_path)
    assert "1 of 1" in status and "printed no return" in said and not boxes.CSV.exists()
    script.write_text(PRINTS)
    small = boxes.ENVIRONMENTS["CartPole-v1"]._replace(threshold=-141)
    boxes.ENVIRONMENTS["CartPole-v1"] = small
    status, table, _ = call(*given, "--cleanrl", tmp_path)
    [row] = boxes.read().values()
    assert status == 0 and (row["steps"], row["greedy"], row["training"]) == ("1500", "", "-101.0")
    assert row["reach_steps"] == "1100"  # -200.5 + 10 + 49.5
    assert "| CleanRL ppo.py | – | -101.0 | 100% | 1,100 |" in table


def test_cleanrl_without_a_checkout_is_a_sentence(call):
    status, _, said = call("--only", "CartPole.*cleanrl")
    assert status == 2 and said.endswith(
        "error: CleanRL's runs need --cleanrl CHECKOUT and --cleanrl-python PYTHON.\n"
    )


def handmade(boxes, env, entry, seed, **figures) -> dict:
    """A row as it is read from the CSV."""
    numbers = dict.fromkeys(boxes.NUMBERS, "") | {"steps": 3000, "seconds": 9, "peak": 250}
    row = {"env": env, "entry": entry, "seed": seed, "command": boxes.Job(env, entry, seed).command}
    row |= numbers | {"commit": "c", "versions": "v", "curve": "[]"} | figures
    return {name: str(row[name]) for name in boxes.COLUMNS}


def rows_of(boxes, entry, *seeds) -> dict:
    made = [handmade(boxes, "CartPole-v1", entry, i + 1, **seed) for i, seed in enumerate(seeds)]
    return {("CartPole-v1", entry, row["seed"]): row for row in made}


def test_the_table(boxes):
    rows = rows_of(boxes, boxes.SB3, {"greedy": 7, "start_up": 2.25})
    rows |= rows_of(
        boxes,
        "ppo.py",
        {"greedy": 400, "training": 90, "reach_steps": 1000, "reach_seconds": 3, "seconds": 11},
        {"greedy": 500, "training": 100, "reach_steps": 2000, "reach_seconds": 5},
        {"greedy": 410, "training": 10, "seconds": 10},
        {"greedy": 1, "training": 20, "seconds": 20},
    )
    rows |= {("Gone-v0", "ppo.py", "1"): {}}
    lines = boxes.table(rows).splitlines()
    assert lines[0] == "**CartPole-v1**, 3,000 steps, threshold 20" and len(lines) == 6
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|") == 11
    assert lines[4] == (
        "| ppo.py | 405.0 [1.0, 500.0] | 55.0 [10.0, 100.0] | 50% | 1,500 [1,000, 2,000] "
        "| 4.0 [3.0, 5.0] | 10 [9, 20] | – | 250 [250, 250] | 4 |"
    )
    assert boxes.overview(rows).splitlines() == [
        "| | CartPole-v1<br>3,000 steps<br>threshold 20 | seconds, geometric mean |",
        "|-|-|-|",
        "| `ppo.py` | 405<br>3 of 4<br>> 7.5 s | > 7.5 |",  # of 3, 5, and the whole 10 and 20 s
        f"| {boxes.SB3} | 7<br>0 of 1<br>> 9.0 s | > 9.0 |",
    ]
    boxes.ENVIRONMENTS["Acrobot-v1"] = boxes.Environment(3000, -100, "ppo.py --env-id Acrobot-v1")
    with_flag = boxes.Environment(3000, 2000, "ppo.py --env-id Hopper-v4", " --norm-obs")
    boxes.ENVIRONMENTS["Hopper-v5"] = with_flag
    acrobot = [
        handmade(boxes, "Acrobot-v1", "ppo.py", i, greedy=-90, seconds=30) for i in (1, 2, 3)
    ]
    for row, greedy in zip(acrobot[1:], (-100.4, -101)):  # as rounded it would be above
        row |= {"greedy": greedy, "reach_seconds": 30}
    hopper = handmade(boxes, "Hopper-v5", "ppo.py", 1, greedy=2000)
    rows |= {(row["env"], "ppo.py", row["seed"]): row for row in [*acrobot, hopper]}
    head, _, *cells = boxes.overview(rows).splitlines()
    assert head == (
        "| | CartPole-v1<br>3,000 steps<br>threshold 20 "
        "| Acrobot-v1<br>3,000 steps<br>threshold -100 "
        "| seconds, geometric mean |"
    )
    assert cells == [
        "| `ppo.py` | 405<br>3 of 4<br>> 7.5 s | -100.4<br>1 of 3<br>30 s | > 15 |",  # √(7.5·30)
        f"| {boxes.SB3} | 7<br>0 of 1<br>> 9.0 s | – | – |",
    ]
    hoppers = [
        handmade(boxes, "Hopper-v5", entry, 1, training=9, greedy=2500, reach_seconds=2)
        for entry in boxes.entries("Hopper-v5")
    ]
    rows |= {(row["env"], row["entry"], row["seed"]): row for row in hoppers}
    head, _, *cells = boxes.overview(rows).splitlines()
    assert head.endswith(
        "| Hopper-v5<br>3,000 steps<br>threshold 2000 | seconds, geometric mean of the first 2 |"
    )
    of_ppo = "| `ppo.py` | 405<br>3 of 4<br>> 7.5 s | -100.4<br>1 of 3<br>30 s "
    assert of_ppo + "| 2500<br>1 of 1<br>2.0 s | > 15 |" in cells
    assert "| CleanRL | – | – | 2500<br>1 of 1<br>2.0 s | – |" in cells
    assert lines[5] == f"| {boxes.SB3} | 7.0 | – | 0% | – | – | 9 | 2.2 | 250 | 1 |"


def test_the_picture(boxes, call, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib"), pytest.importorskip("scipy")
    report = importlib.import_module("report")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    drawn, close = [], report.plt.close
    monkeypatch.setattr(report.plt, "close", drawn.append)
    rows = rows_of(boxes, boxes.SB3, {"curve": [[100, 5, 20], [3000, 60, 21]]}, {})
    curves = [[100, 1, 10], [3000, 4, 20]], [[100, 2, 12], [3000, 6, 40]]
    rows |= rows_of(boxes, "ppo.py", *({"curve": json.dumps(curve)} for curve in curves))
    boxes.draw(rows, ["CartPole-v1"])
    assert (tmp_path / "figures" / "boxes.svg").stat().st_size > 1000
    [axes] = drawn[0].axes
    close(drawn[0])
    names = {text.get_text(): text for text in axes.texts}
    assert set(names) == {"ppo.py", boxes.SB3}
    ours, theirs = (names[name].get_position()[1] for name in ("ppo.py", boxes.SB3))
    assert ours - theirs >= 0.089  # 30 and 21
    line = axes.lines[0]  # from where both have a mean, to the median of their ends
    assert line.get_xdata()[[0, -1]] == pytest.approx([2, 5])
    assert line.get_ydata()[-1] == pytest.approx((20 + 33) / 2)
    status, *_ = call("--draw", "CartPole-v1", "CartPole-v1")
    assert status == "boxes.py: boxes.csv has no curves of CartPole-v1."
