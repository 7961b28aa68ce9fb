"""What a person types and sees: whole runs, saved models, one sentence for what cannot work."""

import importlib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.child import ROOT, SCRIPTS, TINY, both_kinds, curves, each_script, only_run, read

CHARTS = ["episodic_return", "episodic_length", "SPS", "learning_rate"]
LOSSES = ["policy_loss", "entropy", "approx_kl", "clipfrac", "grad_norm"]
TAGS = {f"charts/{x}" for x in CHARTS} | {f"losses/{x}" for x in LOSSES} | {"eval/episodic_return"}
GRPO_TAGS = {"losses/kl", "group/zero_std_frac", "group/return_std"}
PPO_TAGS = {"losses/value_loss", "losses/explained_variance"}
EVALUATION = re.compile(r"(Greedy|Sampled) evaluation, 2 episodes: return (\S+) ± (\S+)\n")


@each_script
def test_a_run_prints_logs_and_saves_what_it_did(cli, script):
    status, out, err = cli(script, *TINY[script])
    run_dir = only_run()
    assert status == 0, err
    assert re.fullmatch(rf"CartPole-v1__{script}__1__\d+", run_dir.name)
    if script == "grpo_process":  # for CartPole pays 1 for every step
        no_signal = "No signal yet: all advantages of the first iteration are 0.\n"
        assert out.count(no_signal) == 1
        out = out.replace(no_signal, "")
    device, resume, steps, train, greedy, logs, watch = out.splitlines()
    assert device == "Device: CPU" and logs == "Logs:  tensorboard --logdir runs"
    command = rf"python \S*{script}.py"
    checkpoint, model = run_dir / "checkpoint.pt", run_dir / "model.pt"
    assert re.fullmatch(f"If it stops: {command} --resume {checkpoint}", resume)
    assert re.fullmatch(f"Watch: {command} --evaluate {model} --render", watch)
    steps = int(re.fullmatch(r"Trained (\d+) steps in [\d.]+ s \([\d,]+ steps/s\)", steps)[1])
    train = float(re.fullmatch(r"Training return, last 100 episodes: (\S+)", train)[1])
    greedy = float(EVALUATION.fullmatch(greedy + "\n")[2])
    assert 300 < steps <= 400 and 8 <= train <= 20 and 8 <= greedy <= 20
    *_, bar, end = re.split("[\r\n]", err)  # of the progress, which is shown on no terminal, too
    assert re.search(rf"{steps}/400 \[.*return=[\d.]+, approx_kl=[\d.]+\]", bar) and not end
    points = curves(run_dir)
    assert points.keys() == TAGS | (PPO_TAGS if script == "ppo" else GRPO_TAGS)
    assert points["eval/episodic_return"] == {steps: pytest.approx(greedy, abs=0.01)}
    assert max(points["losses/entropy"]) == steps
    if script != "ppo":  # all steps belong to whole episodes: the curves give the printed numbers
        lengths = points["charts/episodic_length"].values()
        returns = points["charts/episodic_return"].values()
        assert 4 * sum(lengths) == pytest.approx(steps, rel=1e-6)
        assert np.mean(list(returns)) == pytest.approx(train, abs=0.01)  # of under 100 episodes
    events = EventAccumulator(str(run_dir)).Reload()
    assert "hidden_size|8" in str(events.Tensors("hyperparameters/text_summary")[0])


@both_kinds
def test_a_saved_model_plays_as_it_was_evaluated(cli, script):
    _, out, _ = cli(script, *TINY[script], "--env-id", "Pendulum-v1", "--norm-obs")
    model = only_run() / "model.pt"
    saved = read(model)
    assert saved["script"] == script and saved["args"]["env_id"] == "Pendulum-v1"
    assert (saved["policy"]["obs_stats.mean"] != 0).all()
    play = ["--evaluate", model]
    status, again, _ = cli(script, *play)
    assert status == 0 and again == EVALUATION.search(out)[0]
    other, same = (cli(script, *play, "--seed", 2)[1] for _ in range(2))
    assert other == same != again
    sampled, same = (cli(script, *play, "--no-greedy")[1] for _ in range(2))
    assert sampled == same and sampled.startswith("Sampled")
    assert EVALUATION.fullmatch(sampled)[2] != EVALUATION.fullmatch(again)[2]


@both_kinds
@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly_to_0(cli, script, anneal):
    """Each iteration has that of the budget left when it begins."""
    flag = "--anneal-lr" if anneal else "--no-anneal-lr"
    cli(script, *TINY[script], "--learning-rate", 0.02, flag)
    rates = curves(only_run())["charts/learning_rate"]
    starts = [0, *rates][:-1]
    expected = [0.02 * (1 - start / 400 if anneal else 1) for start in starts]
    assert len(rates) > 3 and list(rates.values()) == pytest.approx(expected)


@both_kinds
def test_the_same_seed_gives_the_same_weights(cli, script):
    weights = []
    for seed in (1, 1, 2):
        assert cli(script, *TINY[script], "--seed", seed)[0] == 0
        policy = read(only_run() / "model.pt")["policy"]
        weights.append(torch.cat([x.flatten() for x in policy.values()]))
        only_run().rename(f"run-{len(weights)}")
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@each_script
def test_help_explains_every_option(cli, script):
    status, out, _ = cli(script, "--help")
    out = " ".join(out.replace("│", " ").split())  # without the frame
    source = (ROOT / f"{script}.py").read_text()
    assert status == 0
    for field in fields(importlib.import_module(script).Args):
        why = re.search(rf"^    {field.name}: .+?  # (.{{10,}})$", source, re.M)[1]
        option = f"--{field.name.replace('_', '-')}"
        assert option in out and why in out, option


BAD_INPUT = [
    (["--env-id", "CartPol-v1"], r"Did you mean: `CartPole`\?"),
    (["--env-id", "CartPole-v9"], r"`v1`"),
    (["--env-id", "Cart Pole"], r"Malformed environment ID"),
    (["--env-id", "Hopper-v3"], r"Cannot make Hopper-v3.*mujoco"),
    (["--env-id", "nowhere:Env-v0"], r"No module named 'nowhere'"),
    (["--gamma", "1.01"], r"--gamma must be from 0 to 1, not 1.01\."),
    (["--learning-rate", "-0.1"], r"--learning-rate must be from 0 to .*, not -0.1\."),
    (["--learning-rate", "nan"], r"--learning-rate must be from 0 to .*, not nan\."),
    (["--checkpoint-interval", "inf"], r"--checkpoint-interval must be from 0 to"),
    (["--eval-episodes", "0"], r"--eval-episodes must be from 1 to"),
    (["--seed", "-1"], r"--seed must be from 0 to"),
    (["--hidden-size", "1000000"], r"--hidden-size must be from 1 to 16,384"),
    (["--num-threads", "2147483648"], r"--num-threads must be from 1 to 1,024"),
    (["--group-size", "1"], r"--group-size must be from 2 to .*, not 1\."),
    (["--total-timesteps", "2"], "--total-timesteps allows no iteration: lower --num-gr"),
    (["--evaluate", "nowhere.pt"], r"Cannot use nowhere.pt: .*No such file"),
    (["--resume", "nowhere.pt"], r"Cannot use nowhere.pt: .*No such file"),
    (["--evaluate", ""], r"Cannot use : "),
]
BAD_INPUT = [("grpo_rtg", *case) for case in BAD_INPUT]
BAD_INPUT += [(x, ["--num-minibatches", "0"], "--num-minibatches must be") for x in SCRIPTS]
BAD_INPUT += [
    ("ppo", ["--gae-lambda", "1.5"], "--gae-lambda must be from 0 to 1, not 1.5"),
    ("ppo", ["--num-envs", "0"], "--num-envs must be from 1"),
    (
        "ppo",
        ["--total-timesteps", "1023"],
        "--total-timesteps allows no iteration: lower --num-envs",
    ),
]


@pytest.mark.filterwarnings("ignore:.*is out of date")  # Gymnasium's, of Hopper-v3
@pytest.mark.parametrize(("script", "args", "message"), BAD_INPUT, ids=str)
def test_bad_input_gets_one_sentence_and_status_2(refused, script, args, message):
    refused(message, script, *args)
    assert "allows no" in message or not Path("runs").exists()


def test_a_missing_extra_names_its_pip_command(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    refused(r'pip install "gymnasium\[box2d\]"', "grpo_rtg", "--env-id", "LunarLander-v3")


def test_what_is_tracked_has_the_run_s_name(cli, refused, monkeypatch):
    """From inside its folder, too. Without wandb there is no run."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    refused("wandb", "grpo_rtg", "--track")
    assert not Path("runs").exists()
    runs = []
    wandb = SimpleNamespace(init=lambda **options: runs.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert cli("grpo_rtg", "--track", *TINY["grpo_rtg"])[0] == 0
    run_dir = only_run().resolve()
    monkeypatch.chdir(run_dir)
    assert cli("grpo_rtg", "--resume", "checkpoint.pt", "--total-timesteps", 500)[0] == 0
    assert [run["id"] for run in runs] == [run["name"] for run in runs] == [run_dir.name] * 2
    assert [run["config"]["total_timesteps"] for run in runs] == [400, 500]
    assert not Path("runs").exists()  # it went on in its own folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_warns_and_trains_on_the_cpu(cli):
    status, out, _ = cli("grpo_rtg", "--cuda", *TINY["grpo_rtg"])
    assert status == 0 and "WARNING: --cuda was asked for, but there is no GPU" in out
    assert "Device: CPU\n" in out


def test_tied_groups_say_once_that_there_is_no_signal(cli):
    """Every member of MountainCar's groups times out with the same return."""
    args = ["--env-id", "MountainCar-v0", "--gamma", 1.0, "--baseline", "timestep"]
    out = cli("grpo_rtg", *TINY["grpo_rtg"], *args)[1]
    assert out.count("No signal yet: all advantages of the first iteration are 0.\n") == 1
    points = curves(only_run())
    assert list(points["group/zero_std_frac"].values()) == [1.0] * 5
    assert list(points["losses/grad_norm"].values()) == [0.0] * 5


@both_kinds
def test_every_environment_that_is_stepped_is_closed(cli, script, monkeypatch):
    stepped, closed, make = set(), set(), gym.make

    def watched(*args, **kwargs):
        env = make(*args, **kwargs)
        step, close = env.step, env.close
        env.step = lambda action: stepped.add(env) or step(action)
        env.close = lambda: closed.add(env) or close()
        return env

    monkeypatch.setattr(gym, "make", watched)
    assert cli(script, *TINY[script], "--eval-interval", 200)[0] == 0
    assert len(stepped) >= 8 and stepped <= closed


@pytest.mark.slow
def test_a_start_does_not_wait_for_torchs_compiler():
    """Nothing in a run, or in its resumption, imports it: a start would take a second more."""

    def run(*options):
        command = [sys.executable, "-X", "importtime", ROOT / "grpo_rtg.py", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "Greedy evaluation" in done.stdout, done.stderr
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
        assert "torch.optim" in imported and "torch._dynamo" not in imported

    run(*TINY["grpo_rtg"])
    run("--resume", only_run() / "checkpoint.pt", "--total-timesteps", 800)
