"""Environments that break the rules: what can be used is trained on; for the rest one looks there.

An exception keeps its traceback and gets a note that says where; NaN is one sentence.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.child import TINY
from tests.child import run as run_child
from tests.envs import Hostile

both_kinds = pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])  # which differ in more than Â
HARMLESS = [what for what in Hostile.step_does if what.startswith("harmless")]
INFINITE = [what for what in Hostile.step_does if re.search(" nan| infinite", what)]
INFINITE += ["reset returns infinity"]
RAISED = ["reset raises", "step raises", "step returns four", "step returns none"]
MALFORMED = Hostile.reset_does.keys() | Hostile.step_does.keys()
MALFORMED = sorted(MALFORMED - {*HARMLESS, *INFINITE, *RAISED})


def env_id(what: str) -> str:
    return f"tests.envs:{what.title().replace(' ', '')}-v0"


@both_kinds
@pytest.mark.parametrize("what", RAISED)
def test_an_exception_says_where_it_was_raised(cli, script, what):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        cli(script, *TINY[script], "--env-id", env_id(what))
    assert caught.type is RuntimeError or "unpack" in str(caught.value)
    [note] = caught.value.__notes__
    step = "0: None" if "reset" in what else "3: [01]"  # with the action
    name = env_id(what).partition(":")[2]
    assert re.fullmatch(rf"<Hostile<{name}>>: reset\(seed=\d+\), step {step}", note), note


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_used_says_where_it_came_from(cli, what):
    with pytest.raises((TypeError, ValueError)) as caught:
        cli("grpo_rtg", *TINY["grpo_rtg"], "--env-id", env_id(what))
    [note] = caught.value.__notes__
    step = 0 if "reset" in what else 3
    assert re.match(rf"<Hostile<\w+-v0>>: reset\(seed=\d+\), step {step}: ", note), note


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_used_is_not_trained_on_by_ppo(cli, what):
    with pytest.raises((TypeError, ValueError)):
        cli("ppo", *TINY["ppo"], "--env-id", env_id(what))


@both_kinds
@pytest.mark.parametrize("what", INFINITE)
def test_nan_and_infinity_are_one_sentence(cli, script, what):
    status, _, err = cli(script, *TINY[script], "--env-id", env_id(what))
    sentence = rf"{script}.py: <Hostile<\w+-v0>> gives numbers that are not finite\."
    assert status == 2 and any(re.fullmatch(sentence, x) for x in re.split("[\r\n]", err)), err
    assert "Traceback" not in err


@both_kinds
@pytest.mark.parametrize("what", HARMLESS)
def test_what_can_be_used_is_used(cli, script, what):
    status, out, err = cli(script, *TINY[script], "--env-id", env_id(what))
    assert status == 0 and "return 15.00 ± 0.00" in out, err


def test_as_a_process_the_note_follows_the_traceback(tmp_path):
    command = [*TINY["grpo_rtg"], "--env-id", env_id("step raises")]
    assert run_child("grpo_rtg", *command, folder=tmp_path) == 1
    error = (tmp_path / "err.txt").read_text()
    last = r"^RuntimeError: the simulator is gone\n<Hostile<\S+>>: reset\(seed=\d+\), step 3: [01]$"
    assert error.count("Traceback") == 1 and re.search(last, error, re.M), error


@pytest.mark.parametrize(("script", "iterations"), [("grpo_rtg", 29), ("ppo", 9)])
def test_a_late_fault_costs_nothing(cli, script, iterations, monkeypatch):
    """Each instance's 30th episode fails; ppo.py needs it in its 10th iteration, at step 148."""
    command = [*TINY[script], "--env-id", "tests.envs:Late-v0", "--checkpoint-interval", 0]
    command += ["--total-timesteps", 800]
    with pytest.raises(RuntimeError):
        cli(script, *command)
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    assert torch.load(checkpoint, weights_only=True)["iteration"] == iterations
    monkeypatch.setattr(Hostile, "bad", False)  # it is mended
    assert cli(script, *command, "--resume", checkpoint)[0] == 0
    checkpoint.parent.rename("resumed")
    assert cli(script, *command)[0] == 0
    [model] = Path("runs").glob("*/model.pt")
    resumed, whole = (
        torch.load(path, weights_only=True)["policy"] for path in ("resumed/model.pt", model)
    )
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_an_environment_that_fails_only_in_the_evaluation_costs_no_model(cli, monkeypatch):
    """That after training: it has passed the one before."""
    reset, seeds = Hostile.reset, []

    def fails_the_second_time(self, *, seed=None, options=None):
        seeds.append(seed)
        if seeds.count(10**9) == 2:
            raise RuntimeError("not this seed")
        return reset(self, seed=seed)

    monkeypatch.setattr(Hostile, "reset", fails_the_second_time)
    with pytest.raises(RuntimeError) as caught:
        cli("grpo_rtg", *TINY["grpo_rtg"], "--env-id", env_id("harmless list"))
    assert "reset(seed=1000000000)" in caught.value.__notes__[0]
    assert list(Path("runs").glob("*/model.pt"))


@both_kinds
def test_an_update_that_becomes_nan_ends_the_run_with_a_checkpoint_from_before(cli, script):
    status, _, err = cli(script, *TINY[script], "--env-id", "Pendulum-v1", "--learning-rate", 1e12)
    assert status == 2 and f"{script}.py: The update became NaN or infinite: lower" in err
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    policy = torch.load(checkpoint, weights_only=True)["policy"]
    assert all(value.isfinite().all() for value in policy.values())


@both_kinds
def test_episodes_of_one_step_are_learned(cli, script):
    """Only action 7 of three pays."""
    args = ["--env-id", "tests.envs:OneStep-v0", "--learning-rate", 0.02]
    status, out, err = cli(script, *TINY[script], *args)
    assert status == 0 and "return 1.00 ± 0.00" in out, err


def test_an_environment_that_never_ends_is_cut_after_1000_steps(cli):
    """Or where --max-episode-steps says. One of its three actions pays 1."""
    endless = ["--env-id", "tests.envs:Endless-v0", "--total-timesteps", 4000]
    for given, longest in (0, 1000), (50, 50):
        cut = ["--max-episode-steps", given]
        status, _, err = cli("grpo_rtg", *TINY["grpo_rtg"], *endless, *cut)
        assert status == 0, err
        run_dir = max(Path("runs").iterdir(), key=lambda path: path.name)
        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        assert checkpoint["step"] == 4000 and len(checkpoint["recent"]) == min(4000 // longest, 100)


@pytest.mark.parametrize("script", ["grpo_outcome", "grpo_process", "grpo_rtg"])
def test_the_unit_of_the_rewards_changes_nothing(cli, script):
    """Rewards of 10^12 or 10^-12 instead of 1: the same weights, to rounding."""
    weights = []
    for name in ("FromFive", "Huge", "Tiny"):
        assert cli(script, *TINY[script], "--env-id", f"tests.envs:{name}-v0")[0] == 0
        [model] = Path("runs").glob(f"*{name}*/model.pt")
        weights.append(torch.load(model, weights_only=True)["policy"])
    for name, value in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scale", ["Huge", "Tiny"])
def test_ppo_takes_any_unit_of_rewards(cli, scale):
    """Without NaN. But its critic's targets have that unit: it learns best where that is 1."""
    status, out, err = cli("ppo", *TINY["ppo"], "--env-id", f"tests.envs:{scale}-v0")
    assert status == 0 and "Greedy evaluation" in out, err


def test_groups_that_start_unequal_are_refused_unless_that_is_meant(cli):
    args = [*TINY["grpo_rtg"], "--env-id", "tests.envs:IgnoresSeed-v0"]
    status, _, err = cli("grpo_rtg", *args)
    assert status == 2 and "ignores reset(seed): fix it, or --no-seed-groups." in err
    assert cli("grpo_rtg", *args, "--no-seed-groups")[0] == 0


def test_ppo_says_when_an_environment_does_not_repeat_itself(cli):
    """It ignores the seed: a resumed run cannot be the one that was interrupted."""
    for env_id, said in ("tests.envs:IgnoresSeed-v0", True), ("CartPole-v1", False):
        assert cli("ppo", *TINY["ppo"], "--env-id", env_id)[0] == 0
        [checkpoint] = Path("runs").glob(f"{env_id.replace(':', '-')}*/checkpoint.pt")
        resume = ["--resume", checkpoint, "--env-id", env_id, "--total-timesteps", 800]
        status, out, err = cli("ppo", *resume)
        assert status == 0, err
        assert (f"{env_id} does not repeat itself: its episodes start anew." in out) == said
