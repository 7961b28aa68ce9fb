"""docs/benchmark/boxes.py and defaults.py: rows are what the programs did, tables by hand."""

import importlib
import json

import pytest

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"


@pytest.fixture
def boxes(monkeypatch, tmp_path):
    """The module with a CSV in the test's folder and CartPole only, for 5,000 steps."""
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("boxes")
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


def made(boxes, entry, seed, **figures) -> dict:
    """A row as it is read from the CSV."""
    job = boxes.Job("CartPole-v1", entry, seed)
    numbers = dict.fromkeys(boxes.NUMBERS, "") | {"seconds": 9, "peak": 250}
    row = numbers | {"command": job.command, "curve": "[]"} | figures
    return {job.key: {name: str(value) for name, value in row.items()}}


def test_the_tables(boxes, monkeypatch):
    rows = made(boxes, boxes.SB3, 1, greedy=7)
    rows |= made(boxes, "ppo.py", 1, greedy=400, reach_steps=1000, reach_seconds=3, seconds=11)
    rows |= made(boxes, "ppo.py", 2, greedy=500, reach_steps=2000, reach_seconds=5)
    rows |= made(boxes, "ppo.py", 3, greedy=410, seconds=10)
    rows |= made(boxes, "ppo.py", 4, greedy=1, seconds=20)
    row = "| ppo.py | 405.0 [1.0, 500.0] | – | 50% | 1,500 [1,000, 2,000] | 4.0 [3.0, 5.0] "
    assert row + "| 10 [9, 20] | – | 250 [250, 250] | 4 |" in boxes.table(rows)
    head, _, *lines = boxes.overview(rows).splitlines()
    assert "CartPole-v1<br>5,000 steps<br>threshold 20 |" in head
    assert lines == [
        "| `ppo.py` | 405<br>3 of 4<br>> 7.5 s | > 7.5 |",  # of 3, 5, and the whole 10 and 20 s
        f"| {boxes.SB3} | 7<br>0 of 1<br>> 9.0 s | > 9.0 |",
    ]
    defaults = importlib.import_module("defaults")
    monkeypatch.setattr(defaults, "ENVIRONMENTS", ["CartPole-v1"])
    first, second = defaults.candidates()[:2]
    rows = made(boxes, first, 101, greedy=-9, reach_seconds=4)
    rows |= made(boxes, first, 102, greedy=-9)  # never: all its 9 s count, √(4·9) = 6
    rows |= made(boxes, second, 101, greedy=99, reach_seconds=2)
    _, _, best, worse = defaults.table(rows).splitlines()
    assert best == f"| {defaults.name(second)} | 2.0 | 2.0, 99, 1 of 1 |"
    assert worse == f"| {defaults.name(first)} | 6.0 | 6.0, -9, 0 of 2 |"
