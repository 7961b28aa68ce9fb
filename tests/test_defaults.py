"""docs/benchmark/defaults.py: its number is the geometric mean of the seconds to the thresholds."""

import importlib
import re

import pytest

from tests import child

FOLDER = child.ROOT / "docs" / "benchmark"


@pytest.fixture
def defaults(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("defaults")


def rows(defaults, entry, seconds, reach, greedy):
    """A run on each environment, of seeds 101 and 102, that takes these seconds."""
    found = {}
    for env in defaults.ENVIRONMENTS:
        for seed in (101, 102):
            job = defaults.boxes.Job(env, entry, seed)
            row = dict.fromkeys(defaults.boxes.NUMBERS, "1")
            row |= {"command": job.command, "seconds": str(seconds)}
            row |= {"reach_seconds": reach[seed], "greedy": str(greedy)}
            found[job.key] = row
    return found


def test_the_number(defaults):
    """Seed 101 is there after 4 s; 102 never is, and counts with all its 9 s: √(4·9) = 6."""
    first, second = defaults.candidates()[:2]
    assert defaults.name(first) == "`grpo_rtg.py` 4x4 8:4 0.003, timestep"
    table = rows(defaults, first, 9, {101: "4", 102: ""}, -1000)
    table |= rows(defaults, second, 9, {101: "2", 102: "2"}, 1000)
    head, line, best, worse = defaults.table(table).splitlines()
    assert best.startswith(f"| {defaults.name(second)} | 2.0 | 2.0, 1000, 2 of 2 |")
    assert worse.startswith(f"| {defaults.name(first)} | 6.0 | 6.0, -1000, 0 of 2 |")


def test_a_candidate_without_one_of_the_environments_and_a_changed_command_do_not_count(defaults):
    first, second = defaults.candidates()[:2]
    whole = rows(defaults, first, 9, {101: "4", 102: "4"}, 0)
    part = rows(defaults, second, 9, {101: "4", 102: "4"}, 0)
    part = {key: row for key, row in part.items() if key[0] != "Acrobot-v1"}
    assert len(defaults.table(whole | part).splitlines()) == 3
    for row in whole.values():
        row["command"] += " --gamma 1"
    assert len(defaults.table(whole | part).splitlines()) == 2


def test_candidates_name_all_that_may_become_a_default(defaults):
    """So that their rows say the same once the defaults are others."""
    candidates = defaults.candidates()
    assert len(set(candidates)) == len(candidates)
    shape = {"ppo.py": "num-envs num-steps gae-lambda", "": "num-groups group-size"}
    for candidate in candidates:
        script = candidate.split()[0]
        named = shape.get(script, shape[""]) + " gamma clip-coef update-epochs learning-rate"
        named += " num-minibatches" + " baseline" * (script == "grpo_rtg.py")
        assert set(named.split()) <= set(re.findall(r"--(\S+)", candidate))
