"""What a person types and sees: whole runs, saved models, one sentence for what cannot work."""

import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.child import ROOT, SCRIPTS, TINY, both_kinds, curves, env, only_run

EVALUATION = re.compile(r"(Greedy|Sampled) evaluation, 2 episodes: return (\S+) ± (\S+)\n")


@both_kinds
def test_a_run_prints_logs_and_saves_what_it_did(cli, script):
    status, out, err = cli(script, **TINY[script])
    run_dir = only_run()
    assert status == 0 and re.fullmatch(rf"CartPole-v1__{script}__1__[-\d]{{22}}", run_dir.name)
    device, resume, steps, train, greedy, logs, watch = out.splitlines()
    assert device == "Device: CPU" and logs == "Logs:  tensorboard --logdir runs"
    assert resume == f"To resume: python {script}.py --resume {run_dir / 'checkpoint.pt'}"
    assert sys.stdout.line_buffering  # so that a killed run's log has that line
    assert watch == f"Watch: python {script}.py --evaluate {run_dir / 'checkpoint.pt'} --render"
    trained = re.fullmatch(r"Trained (\d+) steps in [\d.]+ s \([\d,]+ steps/s\)", steps)
    train = float(re.fullmatch(r"Training return, last \d+ episodes: (\S+)", train)[1])
    assert 400 <= int(trained[1]) < 600 and 8 <= train <= 20
    greedy = float(EVALUATION.fullmatch(greedy + "\n")[2])
    assert re.search(rf"{trained[1]} steps .*return=[\d.]+\]", err)
    points = curves(run_dir)
    names = ["losses/policy_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac"]
    names += ["losses/grad_norm", "charts/episodic_return", "charts/SPS", "eval/episodic_return"]
    assert points.keys() >= {*names, "losses/value_loss" if script == "ppo" else "losses/kl"}
    assert points["eval/episodic_return"] == {int(trained[1]): pytest.approx(greedy, abs=0.01)}
    if script == "grpo_rtg":  # all steps are of whole episodes: the curves give the numbers above
        lengths = [*points["charts/episodic_length"].values()]
        assert 4 * np.mean(lengths) * len(lengths) == pytest.approx(int(trained[1]), rel=0.2)
    assert max(points["losses/entropy"]) == int(trained[1])


@both_kinds
@pytest.mark.parametrize("greedy", [True, False])
def test_a_saved_model_plays_as_it_was_evaluated(cli, script, greedy):
    """In its own environment, with its own options, unless others are given."""
    options = TINY[script] | {"env_id": "Pendulum-v1", "norm_obs": True, "greedy": greedy}
    _, out, _ = cli(script, **options)
    model = only_run() / "checkpoint.pt"
    assert (torch.load(model)["policy"]["obs_mean"] != 0).all()
    status, again, _ = cli(script, evaluate=model)
    assert status == 0 and EVALUATION.search(again)[0] == EVALUATION.search(out)[0]
    assert EVALUATION.search(again)[1] == ("Greedy" if greedy else "Sampled")
    other = EVALUATION.search(cli(script, evaluate=model, greedy=not greedy)[1])
    assert other[1] != EVALUATION.search(out)[1] and other[2] != EVALUATION.search(out)[2]
    assert "3 episodes" in cli(script, evaluate=model, eval_episodes=3)[1]


@both_kinds
def test_a_network_of_ones_own_is_trained_and_played(monkeypatch, capsys, script):
    module = importlib.import_module(script)
    idle = type("Idle", (module.Policy,), {"to_env": lambda _, actions: 0 * actions[:, 0]})
    words = ["--total-timesteps", "100", "--eval-episodes", "2"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["own.py", *words])
        module.main(policy_type=idle)
        assert 8 < float(EVALUATION.search(capsys.readouterr().out)[2]) < 11
        words = ["--evaluate", str(only_run() / "checkpoint.pt"), "--no-greedy"]


def test_options_that_are_not_given_are_the_files(cli):
    """Those of another script are passed over, and one that the file lacks has its default."""
    options = TINY["grpo_rtg"] | {"baseline": "group", "anneal_lr": False, "learning_rate": 1e-2}
    cli("grpo_rtg", **options)
    checkpoint = only_run() / "checkpoint.pt"
    states = torch.load(checkpoint)
    del states["args"]["clip_coef"]
    torch.save(states | {"args": states["args"] | {"gae_lambda": 0.5}}, checkpoint)
    assert cli("grpo_rtg", resume=checkpoint, total_timesteps=900, learning_rate=1e-4)[0] == 0
    expected = {"learning_rate": 1e-4, "total_timesteps": 900, "clip_coef": 0.2}
    saved = torch.load(checkpoint)["args"]
    assert saved == states["args"] | expected | {"resume": str(checkpoint)}
    rates = [*curves(checkpoint.parent)["charts/learning_rate"].values()]
    assert (rates[0], rates[-1]) == pytest.approx((1e-2, 1e-4))
    assert cli("grpo_outcome", evaluate=checkpoint)[0] == 0


BAD_INPUT = [
    ({"env_id": "CartPol-v1"}, r"Did you mean: `CartPole`\?"),
    ({"env_id": "nowhere:Env-v0"}, "No module named 'nowhere'"),
    ({"env_kwargs": "is_slippery=false"}, """--env-kwargs must be like '{"size": 8}': Exp"""),
    ({"env_kwargs": "[1]"}, """--env-kwargs must be like '{"size": 8}': """),
    (env("Answer", kind="Tuple"), "Actions must be Discrete.*not Tuple"),
    (env("Answer", kind="strange"), r"Cannot flatten Dict.*: wrap the environment\."),
    (env("Answer", kind="bools"), "Actions must be .* Box of numbers.*bool"),
    ({"env_kwargs": '{"is_slipery": false}'}, "--env-kwargs: .* unexpected keyword argument"),
    ({"env_id": "tests.envs:Answer-v0"}, "--env-kwargs: .* missing 1 required .* 'kind'"),
    ({"env_kwargs": '{"render_mode": "ansi"}'}, "CartPole-v1 has no render mode ansi"),
    ({"gamma": 1.01}, r"--gamma must be .* 1, not 1.01\."),
    ({"gamma": -1}, r"--gamma must be from 0 to 1, not -1\.0\."),
    ({"learning_rate": "nan"}, r"--learning-rate must be .* 0.*, not nan\."),
    ({"learning_rate": 1e12, "env_id": "Pendulum-v1"}, "update .* infinite: lower --learning-r"),
    ({"minibatch_size": 0}, "--minibatch-size must be .* 1.*, not 0"),
    ({"group_size": 1}, r"--group-size must be .* 2.*, not 1\."),
    ({"evaluate": "no.pt"}, "Cannot use no.pt: .*No such file"),
    ({"resume": "text.pt"}, "Cannot use text.pt: "),
    ({"resume": "tensor.pt"}, "Cannot use tensor.pt: "),
]


@pytest.mark.parametrize(("options", "message"), BAD_INPUT, ids=str)
def test_bad_input_gets_one_sentence_and_status_2(refused, options, message):
    Path("text.pt").write_text("not a model")
    torch.save(torch.zeros(3000), "tensor.pt")
    refused(message, "grpo_rtg", **options)
    assert not Path("runs").exists()


def test_ctrl_c_leaves_the_command_that_goes_on(monkeypatch, capsys):
    """One that can be pasted; also where the output is not a terminal's, as in a notebook."""
    module = importlib.import_module("grpo_rtg")
    monkeypatch.setattr(module, "evaluate", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(
        sys, "argv", ["my scripts/grpo_rtg.py", "--exp-name", "a b", "--total-timesteps", "99"]
    )
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 130
    command = re.search("Stopped. To resume: python (.*)", sys.stdout.getvalue())[1]
    script, resume, path = shlex.split(command)
    assert (script, resume) == ("my scripts/grpo_rtg.py", "--resume")
    assert re.fullmatch(r"runs/CartPole-v1__a b__1__[-\d]{22}/checkpoint\.pt", path)


def test_successes_are_counted(cli):
    """Episodes of more than four steps; the seeds' lengths are 2 to 8."""
    out = cli("grpo_rtg", **TINY["grpo_rtg"] | env("Countdown") | {"eval_episodes": 200})[1]
    rate = float(re.search(r"evaluation, 200 episodes: .*, success rate (\S+)", out)[1])
    assert rate == pytest.approx(4 / 7, abs=0.1)
    assert len(curves(only_run())["charts/success_rate"]) > 5


def test_a_strangers_file_runs_no_code(refused):
    class Attack:
        def __reduce__(self):
            return Path.touch, (Path("attacked"),)

    torch.save({"args": {}, "policy": Attack()}, "attack.pt")
    refused("Cannot use attack.pt: .*Weights only load failed", "grpo_rtg", evaluate="attack.pt")
    assert not Path("attacked").exists()


def test_an_environment_of_the_current_folder_is_found(cli):
    register = 'gymnasium.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv")'
    Path("mine.py").write_text(f"import gymnasium\n{register}")
    assert cli("grpo_rtg", **TINY["grpo_rtg"] | {"env_id": "mine:Mine-v0"})[0] == 0


def test_cuda_without_a_gpu_warns_and_trains_on_the_cpu(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, _ = cli("grpo_rtg", "--cuda", **TINY["grpo_rtg"])
    assert status == 0 and "WARNING: torch " in out and "Device: CPU\n" in out


def test_tied_groups_say_once_that_there_is_no_signal(cli):
    """Every member of MountainCar's groups times out with the same return."""
    out = cli("grpo_rtg", **TINY["grpo_rtg"], env_id="MountainCar-v0", gamma=1)[1]
    assert out.count("All advantages are 0") == 1
    assert set(curves(only_run())["group/zero_std_frac"].values()) == {1}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_option(cli, script):
    status, out, _ = cli(script, "--help")
    out = " ".join(out.replace("│", " ").split())  # without the frame
    source = (ROOT / f"{script}.py").read_text()
    assert status == 0
    for field in fields(importlib.import_module(script).Args):
        comment = re.search(rf"^    {field.name}: [^#]+  # (.{{10,}})$", source, re.M)[1]
        assert f"--{field.name.replace('_', '-')}" in out and comment in out


def test_help_can_be_printed_in_any_encoding():
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, ROOT / "grpo_rtg.py", "--help"]
    out = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "--gamma" in out
