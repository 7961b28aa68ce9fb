"""Environments that break the rules end in correct training, or in one sentence that says where to look."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo_rtg
from tests.child import SCRIPTS
from tests.envs import Hostile, Slow
from tests.test_reliability import equal

each_script = pytest.mark.parametrize("script", SCRIPTS)
SHORT = ["--total-timesteps", 600, "--eval-episodes", 3, "--update-epochs", 1, "--num-minibatches", 1]
SHORT = {script: [*SHORT, *(["--num-envs", 8, "--num-steps", 32] if script == "ppo" else [])] for script in SCRIPTS}
PROGRESS = re.compile(r"^[\d,]+ steps in \d+ s: return [-\d.]+$|^No signal at ")
HARMLESS = [what for what in Hostile.step_does if what.startswith("harmless")]
NAN = [
    "observation nan",
    "observation infinite",
    "observation of 1e25",
    "reward nan",
    "reward infinite",
    "reward of 1e200",
]
AT_RESET = list(Hostile.reset_does)
FAULTS = [what for what in AT_RESET + list(Hostile.step_does) if what not in HARMLESS and "sleeps" not in what]


def env_id(what: str) -> str:
    return f"tests.envs:{what.title().replace(' ', '')}-v0"


@each_script
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_sentence_with_environment_seed_and_step(cli, script, what):
    status, _, err = cli(script, "--env-id", env_id(what), *SHORT[script])
    assert status == 2 and err.count("\n") == 1, err
    name = env_id(what).partition(":")[2]
    assert re.match(rf"{script}.py: <Hostile<{name}>>.* reset\(seed=\d+\)", err), err
    if what not in AT_RESET:
        assert re.search(r"failed at step 2 \(action [01]\) after reset", err), err
    if what in NAN:
        assert re.search(rf"ValueError: {what.split()[0]} .* is NaN, infinite or too large", err), err
    if "raises" in what:
        assert re.search(r"RuntimeError: the simulator is gone \(\S+envs.py:\d+\)$", err), err


@each_script
@pytest.mark.parametrize("what", HARMLESS)
def test_what_can_be_used_is_used(cli, script, what):
    status, out, err = cli(script, "--env-id", env_id(what), *SHORT[script])
    assert status == 0 and "return 15.00 ± 0.00" in out, err


@each_script
def test_a_late_fault_costs_nothing(cli, script, monkeypatch):
    """Each instance's 30th episode fails. What was learned before is there, and goes on once that is mended."""
    status, out, err = cli(script, "--env-id", "tests.envs:Late-v0", *SHORT[script], "--total-timesteps", 10_000)
    lines = [line for line in err.splitlines() if not PROGRESS.search(line)]
    assert status == 2 and len(lines) == 2 and "failed at step 2" in err
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    run = torch.load(checkpoint, weights_only=True)["run"]
    assert run["iteration"] == (29 if script != "ppo" else 4)  # ppo: 32 steps of 8 instances each, 5 steps an episode
    assert re.search(rf"Resume: python \S*{script}.py --resume {checkpoint} --env-id tests.envs:Late-v0\n", err)
    monkeypatch.setattr(Hostile, "bad", False)
    status, out, err = cli(script, "--resume", checkpoint, "--env-id", "tests.envs:Late-v0")
    assert status == 0 and "Greedy evaluation" in out, err


@each_script
def test_an_environment_that_fails_only_when_evaluated_costs_no_model(cli, script, monkeypatch):
    evaluate = Hostile.reset

    def reset(self, *, seed=None, options=None):
        if seed >= 10**9 and seed < 10**9 + 100:
            raise RuntimeError("not this seed")
        return evaluate(self, seed=seed)

    monkeypatch.setattr(Hostile, "reset", reset)
    monkeypatch.setattr(Hostile, "bad", False)
    status, out, err = cli(script, "--env-id", "tests.envs:Late-v0", *SHORT[script])
    assert status == 2 and re.search(r"failed in reset\(seed=1000000000\): RuntimeError: not this seed", err)
    [model] = Path("runs").glob("*/model.pt")
    assert f"Model: {model}" in out


@each_script
def test_episodes_of_one_step_are_learned(cli, script):
    """Only action 7 of three pays."""
    args = ["--env-id", "tests.envs:OneStep-v0", "--total-timesteps", 2000, "--eval-episodes", 3]
    status, out, err = cli(script, *args, "--learning-rate", 0.01, "--update-epochs", 4)
    assert status == 0 and "return 1.00 ± 0.00" in out, err


@each_script
def test_an_environment_that_never_ends_is_cut(cli, script):
    status, out, err = cli(script, "--env-id", "tests.envs:Endless-v0", *SHORT[script], "--total-timesteps", 40_000)
    assert status == 0 and "without a time limit: episodes are cut after 1,000 steps (--max-episode-steps)" in out
    cut = ["--max-episode-steps", 20, "--env-id", "tests.envs:Endless-v0"]
    assert cli(script, *cut, *SHORT[script], "--total-timesteps", 1500)[0] == 0


@pytest.mark.parametrize("scale", ["Huge", "Tiny"])
@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_the_unit_of_the_rewards_changes_nothing(cli, script, scale):
    """Rewards of 10^12 or 10^-12 where action 7 pays, of three: the same weights as with rewards of 1, to rounding."""
    weights = []
    for name in ("FromFive", scale):
        args = ["--env-id", f"tests.envs:{name}-v0", *SHORT[script], "--total-timesteps", 2000]
        assert cli(script, *args)[0] == 0
        [model] = Path("runs").glob(f"*{name}*/model.pt")
        weights.append(torch.load(model, weights_only=True)["policy"])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scale", ["Huge", "Tiny"])
def test_ppo_takes_any_unit_of_rewards(cli, scale):
    """Without NaN. But its critic's targets have that unit, so it learns best where returns are of the order of 1."""
    status, out, err = cli("ppo", "--env-id", f"tests.envs:{scale}-v0", *SHORT["ppo"], "--total-timesteps", 5000)
    assert status == 0 and "Greedy evaluation" in out, err


def test_a_slow_member_changes_nothing():
    """One member in four takes 100 times longer: the same rollout."""
    rollouts = []
    for pause in (0, 2e-5):
        envs = [Slow(pause) for _ in range(8)]
        torch.manual_seed(0)
        policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space, 8)
        rollouts.append(grpo_rtg.collect_groups(envs, policy, 2, np.random.default_rng(0)))
    assert equal(rollouts[0]._asdict(), rollouts[1]._asdict())


@each_script
def test_a_fault_in_closing_costs_nothing(cli, script, monkeypatch):
    """Environments are closed when the model is saved."""
    monkeypatch.setattr(Hostile, "close", lambda self: 1 / 0, raising=False)
    status, _, err = cli(script, "--env-id", "tests.envs:HarmlessList-v0", *SHORT[script])
    *progress, line = err.splitlines()
    assert status == 2 and all(map(PROGRESS.search, progress)) and "ZeroDivisionError" in line
    assert list(Path("runs").glob("*/model.pt"))


def test_ppo_goes_on_where_replaying_fails(cli, monkeypatch):
    """The length of its episodes does not repeat, and stepping on after the end raises."""
    step = Hostile.step
    monkeypatch.setattr(Hostile, "bad", False)
    assert cli("ppo", "--env-id", "tests.envs:Late-v0", *SHORT["ppo"])[0] == 0

    def strict(self, action):
        if self.taken >= self.length:
            raise RuntimeError("step after the end")
        return step(self, action)

    def reset(self, *, seed=None, options=None):
        self.length, self.taken = 2, 0
        return self.observe(), {}

    monkeypatch.setattr(Hostile, "step", strict)
    monkeypatch.setattr(Hostile, "reset", reset)
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    args = ["--resume", checkpoint, "--env-id", "tests.envs:Late-v0", "--total-timesteps", 2000]
    status, out, err = cli("ppo", *args)
    assert status == 0 and "does not repeat itself" in out, err


def test_ppo_says_when_an_environment_does_not_repeat_itself(cli):
    """It ignores the seed: a resumed run cannot be the one that was interrupted, and says so."""
    assert cli("ppo", "--env-id", "tests.envs:IgnoresSeed-v0", *SHORT["ppo"])[0] == 0
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    args = ["--resume", checkpoint, "--env-id", "tests.envs:IgnoresSeed-v0", "--total-timesteps", 2000]
    status, out, err = cli("ppo", *args)
    assert status == 0 and "tests.envs:IgnoresSeed-v0 does not repeat itself: its episodes start anew" in out, err
    assert cli("ppo", *SHORT["ppo"])[0] == 0
    [checkpoint] = Path("runs").glob("CartPole*/checkpoint.pt")
    assert "repeat" not in cli("ppo", "--resume", checkpoint, "--total-timesteps", 2000)[1]
