"""Environments that break the rules: what can be used is trained on; the rest is not.

An exception keeps its traceback and costs seconds; NaN is one sentence.
"""

from pathlib import Path

import pytest
import torch

from tests.child import TINY, both_kinds, contents, env, equal, only_run, read
from tests.envs import Hostile

INFINITE = ["reset returns infinity", "observation nan", "reward infinite", "reward none"]
RAISES = sorted({*Hostile.reset_does, *Hostile.step_does} - {*INFINITE, "reward of two"})


@both_kinds
@pytest.mark.parametrize("what", RAISES)
def test_what_cannot_be_used_is_an_exception(cli, script, what):
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)) as caught:
        cli(script, *TINY[script], *env("Hostile", what=what))
    assert "raises" not in what or str(caught.value) == "the simulator is gone"
    assert not list(Path("runs").glob("*/model.pt"))


@both_kinds
@pytest.mark.parametrize("what", INFINITE)
def test_nan_and_infinity_are_one_sentence(refused, script, what):
    sentence = "Hostile.* gives numbers that are not finite"
    refused(sentence, script, *TINY[script], *env("Hostile", what=what))


@both_kinds
def test_what_can_be_used_is_used(cli, script):
    """Lists, integers, rewards of shape (1,), flags that are numbers."""
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
    monkeypatch.setattr(Hostile, "mended", True)
    resume = ["--resume", checkpoint, "--env-id", "tests.envs:Hostile-v0"]
    assert cli(script, *resume)[0] == 0
    checkpoint.parent.rename("resumed")
    assert cli(script, *command)[0] == 0
    one, other = contents(Path("resumed")), contents(only_run())
    assert equal(one, other) or script == "ppo"  # whose episodes start anew


def test_an_environment_that_fails_only_in_the_evaluation_costs_no_model(cli, monkeypatch):
    reset = Hostile.reset
    monkeypatch.setattr(Hostile, "mended", True)

    def fails_in_the_evaluation(self, *, seed=None, options=None):
        return 1 / 0 if seed == 10**9 else reset(self, seed=seed)

    monkeypatch.setattr(Hostile, "reset", fails_in_the_evaluation)
    with pytest.raises(ZeroDivisionError):
        cli("grpo_rtg", *TINY["grpo_rtg"], *env("Hostile", what="step raises"))
    assert (only_run() / "model.pt").exists()


@both_kinds
def test_an_update_that_becomes_nan_ends_the_run_with_a_checkpoint_from_before(refused, script):
    command = [*TINY[script], "--env-id", "Pendulum-v1", "--learning-rate", 1e12]
    refused("The update became NaN or infinite: lower --learning-rate", script, *command)
    policy = read(only_run() / "checkpoint.pt")["policy"]
    assert all(value.isfinite().all() for value in policy.values())


@both_kinds
def test_any_unit_of_rewards_is_taken(script, cli):
    """10^12 or 10^-12 instead of 1. In a GRPO script it changes no weight."""
    weights = []
    for scale in (1.0, 1e12, 1e-12):
        status, _, err = cli(script, *TINY[script], *env("FromFive", scale=scale))
        assert status == 0, err
        weights.append(read(only_run() / "model.pt")["policy"])
        only_run().rename(f"run-{scale}")
    if script == "grpo_rtg":
        for other in weights[1:]:
            torch.testing.assert_close(other, weights[0], rtol=1e-3, atol=1e-5)


def test_groups_that_start_unequal_are_refused_unless_that_is_meant(cli, refused):
    args = [*TINY["grpo_rtg"], *env("IgnoresSeed")]
    refused(r"ignores reset\(seed\), .*: fix that, or --no-seed-groups", "grpo_rtg", *args)
    assert cli("grpo_rtg", *args, "--no-seed-groups")[0] == 0
