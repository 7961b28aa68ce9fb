"""Environments that break the rules: an exception keeps its traceback, NaN is one sentence."""

from pathlib import Path

import pytest

import grpo_rtg
from tests.child import TINY, both_kinds, contents, env, equal, only_run, read
from tests.envs import Countdown, Hostile


@both_kinds
@pytest.mark.parametrize("what", ["reset raises", "reward of two"])
def test_what_cannot_be_used_is_an_exception(cli, script, what):
    with pytest.raises((RuntimeError, ValueError), match="simulator is gone|reshape|sequence"):
        cli(script, *TINY[script], *env("Hostile", what=what))
    assert not list(Path("runs").glob("*/model.pt"))


@both_kinds
@pytest.mark.parametrize("what", ["reset returns infinity", "observation nan", "reward infinite"])
def test_nan_and_infinity_are_one_sentence(refused, script, what):
    sentence = "Hostile.* gives numbers that are not finite"
    refused(sentence, script, *TINY[script], *env("Hostile", what=what))


@both_kinds
def test_what_can_be_used_is_used(cli, script):
    """Lists, rewards of shape (1,), flags that are numbers."""
    status, out, err = cli(script, *TINY[script], *env("Unusual"))
    assert status == 0 and "return 15.00 ± 0.00" in out, err


@pytest.mark.parametrize(("script", "iterations"), [("grpo_rtg", 7), ("ppo", 2)])
def test_a_late_fault_costs_nothing(cli, script, iterations, monkeypatch):
    """Each instance's 8th episode fails; ppo.py needs it in its 3rd iteration, at step 38."""
    command = [*TINY[script], *env("Hostile", what="step raises", episode=8)]
    command += ["--checkpoint-interval", 0]
    with pytest.raises(RuntimeError):
        cli(script, *command)
    checkpoint = only_run() / "checkpoint.pt"
    assert read(checkpoint)["progress"]["iteration"] == iterations
    monkeypatch.setattr(Hostile, "step", Countdown.step)  # mended
    resume = ["--resume", checkpoint, "--env-id", "tests.envs:Hostile-v0"]
    assert cli(script, *resume)[0] == 0
    checkpoint.parent.rename("resumed")
    assert cli(script, *command)[0] == 0
    one, other = contents(Path("resumed")), contents(only_run())
    assert equal(one, other) or script == "ppo"  # whose episodes start anew


def test_a_fault_in_the_evaluation_costs_no_model(cli, monkeypatch):
    monkeypatch.setattr(grpo_rtg, "evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli("grpo_rtg", *TINY["grpo_rtg"])
    assert (only_run() / "model.pt").exists()


@both_kinds
def test_an_update_that_becomes_nan_ends_the_run_with_a_checkpoint_from_before(refused, script):
    command = [*TINY[script], "--env-id", "Pendulum-v1", "--learning-rate", 1e12]
    refused("The update became NaN or infinite: lower --learning-rate", script, *command)
    policy = read(only_run() / "checkpoint.pt")["policy"]
    assert all(value.isfinite().all() for value in policy.values())


def test_groups_that_start_unequal_are_refused_unless_that_is_meant(cli, refused):
    args = [*TINY["grpo_rtg"], *env("IgnoresSeed")]
    refused(r"ignores reset\(seed\), .*: fix that, or --no-seed-groups", "grpo_rtg", *args)
    assert cli("grpo_rtg", *args, "--no-seed-groups")[0] == 0
