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
from gymnasium.envs.classic_control import MountainCarEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.child import ROOT, SCRIPTS, TINY

each_script = pytest.mark.parametrize("script", SCRIPTS)
both_kinds = pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])  # which differ in more than Â
CHARTS = ["episodic_return", "episodic_length", "SPS", "learning_rate"]
LOSSES = ["policy_loss", "entropy", "approx_kl", "clipfrac", "grad_norm"]
TAGS = {f"charts/{x}" for x in CHARTS} | {f"losses/{x}" for x in LOSSES} | {"eval/episodic_return"}
GRPO_TAGS = {"losses/kl", "group/zero_std_frac", "group/return_std"}
PPO_TAGS = {"losses/value_loss", "losses/explained_variance"}
EVALUATION = re.compile(r"(Greedy|Sampled) evaluation, 2 episodes: return (\S+) ± (\S+)\n")


def only_run() -> Path:
    [run_dir] = Path("runs").iterdir()
    return run_dir


@each_script
def test_a_run_prints_logs_and_saves_what_it_did(cli, script):
    status, out, err = cli(script, *TINY[script])
    run_dir = only_run()
    assert status == 0, err
    assert re.fullmatch(rf"CartPole-v1__{script}__1__\d+", run_dir.name)
    device, untrained, resume, *rest, logs, watch = out.splitlines()
    if script == "grpo_process":  # for CartPole pays 1 for every step
        no_signal, steps, train, greedy, not_learned = rest
        assert no_signal.startswith("No signal yet") and greedy == untrained
        assert not_learned.startswith("It plays no better than before training: docs/environments")
    else:
        steps, train, greedy = rest[:3]
    assert device == "Device: CPU" and logs == "Logs:  tensorboard --logdir runs"
    checkpoint, model = run_dir / "checkpoint.pt", run_dir / "model.pt"
    assert resume == f"If it stops: the same command with --resume {checkpoint}"
    assert re.fullmatch(rf"Watch: python \S*{script}.py --evaluate {model} --render", watch)
    steps = int(re.fullmatch(r"Trained (\d+) steps in [\d.]+ s \([\d,]+ steps/s\)", steps)[1])
    train = float(re.fullmatch(r"Training return, last 100 episodes: (\S+)", train)[1])
    greedy = float(EVALUATION.fullmatch(greedy + "\n")[2])
    assert 300 < steps <= 400 and 8 <= train <= 20 and 8 <= greedy <= 20
    *_, bar, end = re.split("[\r\n]", err)  # of the progress, which is shown on no terminal, too
    assert re.search(rf"{steps}/400 \[.*return=[\d.]+, approx_kl=[\d.]+\]", bar) and not end
    events = EventAccumulator(str(run_dir)).Reload()
    own = PPO_TAGS if script == "ppo" else GRPO_TAGS
    assert set(events.Tags()["scalars"]) == TAGS | own
    [evaluation] = events.Scalars("eval/episodic_return")
    assert evaluation.value == pytest.approx(greedy, abs=0.01) and evaluation.step == steps
    assert events.Scalars("losses/entropy")[-1].step == steps
    if script != "ppo":  # all steps belong to whole episodes: the curves give the printed numbers
        lengths, returns = (
            [point.value for point in events.Scalars(f"charts/episodic_{what}")]
            for what in ("length", "return")
        )
        assert 4 * sum(lengths) == pytest.approx(steps, rel=1e-6)
        assert np.mean(returns) == pytest.approx(train, abs=0.01)  # of fewer than 100 episodes
    assert "hidden_size|8" in str(events.Tensors("hyperparameters/text_summary")[0])


@both_kinds
def test_a_saved_model_plays_as_it_was_evaluated(cli, script):
    _, out, _ = cli(script, *TINY[script], "--env-id", "Pendulum-v1", "--norm-obs")
    model = only_run() / "model.pt"
    saved = torch.load(model, weights_only=True)
    assert saved["script"] == script and saved["args"]["env_id"] == "Pendulum-v1"
    assert saved["policy"]["obs_count"] > 0 and (saved["policy"]["obs_mean"] != 0).all()
    play = ["--evaluate", model, "--eval-episodes", 2]
    status, again, _ = cli(script, *play)
    assert status == 0 and again == [*EVALUATION.finditer(out)][-1][0]
    other, same = (cli(script, *play, "--seed", 2)[1] for _ in range(2))
    assert other == same != again
    sampled, same = (cli(script, *play, "--no-greedy")[1] for _ in range(2))
    assert sampled == same and sampled.startswith("Sampled")
    assert EVALUATION.fullmatch(sampled)[2] != EVALUATION.fullmatch(again)[2]


def test_the_printed_command_plays_a_model_whose_environment_is_in_a_module(cli):
    _, out, _ = cli("grpo_rtg", *TINY["grpo_rtg"], "--env-id", "tests.envs:FromFive-v0")
    command = re.search(r"^Watch: python \S+grpo_rtg.py (.+)$", out, re.M)[1].split()
    assert "--render" in command
    status, again, err = cli("grpo_rtg", *command, "--no-render", "--eval-episodes", 2)
    assert status == 0 and again == [*EVALUATION.finditer(out)][-1][0], err


def test_a_model_is_played_with_its_own_options_but_for_those_given(cli):
    """MountainCar's untrained policies time out: after 20 steps as in training, after 30 or 200."""
    cli("grpo_rtg", *TINY["grpo_rtg"], "--env-id", "MountainCar-v0")
    play = ["--evaluate", only_run() / "model.pt", "--eval-episodes", 2]
    for given, steps in (
        ([], 20),
        (["--max-episode-steps", 30], 30),
        (["--max-episode-steps", 0], 200),
    ):
        status, out, err = cli("grpo_rtg", *play, *given)
        assert status == 0 and f"return -{steps}.00 ± 0.00" in out, err


@both_kinds
def test_a_model_is_not_played_with_options_out_of_range(cli, script):
    cli(script, *TINY[script])
    status, out, err = cli(script, "--evaluate", only_run() / "model.pt", "--gamma", 2)
    assert status == 2 and not out and "--gamma must be from 0 to 1, not 2" in err


@both_kinds
@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly_to_0(cli, script, anneal):
    """Each iteration has that of the budget left when it begins."""
    flag = "--anneal-lr" if anneal else "--no-anneal-lr"
    cli(script, *TINY[script], "--learning-rate", 0.02, flag)
    points = EventAccumulator(str(only_run())).Reload().Scalars("charts/learning_rate")
    starts = [0, *(point.step for point in points[:-1])]
    expected = [0.02 * (1 - start / 400 if anneal else 1) for start in starts]
    assert len(points) > 3 and [point.value for point in points] == pytest.approx(expected)


@both_kinds
def test_the_same_seed_gives_the_same_weights(cli, script):
    weights = []
    for seed in (1, 1, 2):
        assert cli(script, *TINY[script], "--seed", seed)[0] == 0
        policy = torch.load(only_run() / "model.pt", weights_only=True)["policy"]
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


BAD_INPUT = {
    "unknown environment": (["--env-id", "CartPol-v1"], r"Did you mean: `CartPole`\?"),
    "unknown version": (["--env-id", "CartPole-v9"], r"`v1`"),
    "malformed id": (["--env-id", "Cart Pole"], r"Malformed environment ID"),
    "retired version": (["--env-id", "Hopper-v3"], r"Cannot make Hopper-v3: .*mujoco"),
    "unknown module": (["--env-id", "nowhere:Env-v0"], r"No module named 'nowhere'"),
    "unsupported actions": (
        ["--env-id", "tests.envs:UnsupportedActions-v0"],
        r"actions are not Discrete or float Box: .*MultiDiscrete\(\[2 2\]\)\.",
    ),
    "unsupported observations": (
        ["--env-id", "tests.envs:UnsupportedObs-v0"],
        r"observations cannot be flattened, .*Graph",
    ),
    "too high": (["--gamma", "1.01"], r"--gamma must be from 0 to 1, not 1.01\."),
    "too low": (["--learning-rate", "-0.1"], r"--learning-rate must be from 0 to .*, not -0.1\."),
    "nan": (["--learning-rate", "nan"], r"--learning-rate must be from 0 to .*, not nan\."),
    "infinite": (["--checkpoint-interval", "inf"], r"--checkpoint-interval must be from 0 to"),
    "none": (["--eval-episodes", "0"], r"--eval-episodes must be from 1 to"),
    "seed": (["--seed", "-1"], r"--seed must be from 0 to"),
    "too wide": (["--hidden-size", "1000000"], r"--hidden-size must be from 1 to 16,384"),
    "too many threads": (["--num-threads", "2147483648"], r"--num-threads must be from 1 to 1,024"),
    "group size": (["--group-size", "1"], r"--group-size must be from 2 to .*, not 1\."),
    "too low a budget": (["--total-timesteps", "2"], r"--total-timesteps 2 allows no iteration\."),
    "no file to play": (
        ["--evaluate", "nowhere.pt"],
        r"Cannot use nowhere.pt here: .*No such file",
    ),
    "no file to resume": (
        ["--resume", "nowhere.pt"],
        r"Cannot use nowhere.pt here: .*No such file",
    ),
    "no name to play": (["--evaluate", ""], r"Cannot use  here: "),
}
CASES = [("grpo_rtg", *case) for case in BAD_INPUT.values()]
CASES += [(script, ["--num-minibatches", "0"], "--num-minibatches must be") for script in SCRIPTS]
CASES += [("ppo", ["--gae-lambda", "1.5"], "--gae-lambda must be from 0 to 1, not 1.5")]
CASES += [("ppo", ["--num-envs", "0"], "--num-envs must be from 1")]
CASES += [("ppo", ["--total-timesteps", "1023"], "--total-timesteps 1023 allows no iteration")]


@pytest.mark.parametrize(("script", "args", "message"), CASES, ids=str)
def test_bad_input_gets_one_sentence_and_status_2(cli, script, args, message):
    status, _, err = cli(script, *args)
    [sentence] = [line for line in re.split("[\r\n]+", err) if line and "steps/s" not in line]
    assert status == 2 and re.match(rf"{script}\.py: .*{message}", sentence), err
    assert not list(Path("runs").glob("*/model.pt"))
    assert "allows no" in err or not Path("runs").exists()


def test_an_unreadable_number_is_refused(cli):
    status, _, err = cli("grpo_rtg", "--gamma", "high")
    assert status == 2 and "--gamma" in err and "high" in err and "Traceback" not in err


def test_a_missing_extra_names_its_pip_command(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    status, _, err = cli("grpo_rtg", "--env-id", "LunarLander-v3")
    assert status == 2 and 'pip install "gymnasium[box2d]"' in err and err.count("\n") == 1


def test_tracking_needs_wandb(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    status, _, err = cli("grpo_rtg", "--track")
    assert status == 2 and "wandb" in err and err.count("\n") == 1 and not Path("runs").exists()


def test_what_is_tracked_has_the_run_s_name(cli, monkeypatch):
    """From inside its folder, too."""
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


@pytest.mark.parametrize(("script", "times"), [("grpo_process", 1), ("grpo_rtg", 0)])
def test_process_supervision_says_once_why_it_learns_nothing_on_cartpole(cli, script, times):
    out = cli(script, *TINY[script])[1]
    message = "No signal yet: all advantages are 0, for in each group every step pays the same."
    assert out.count("No signal") == out.count(message) == times


def test_tied_groups_say_once_that_there_is_no_signal(cli):
    """Every member of MountainCar's groups times out with the same return."""
    args = ["--env-id", "MountainCar-v0", "--gamma", 1.0, "--baseline", "timestep"]
    out = cli("grpo_rtg", *TINY["grpo_rtg"], *args)[1]
    message = "No signal yet: all advantages are 0, for in each group its members tie."
    assert out.count("No signal") == out.count(message) == 1
    events = EventAccumulator(str(only_run())).Reload()
    assert [x.value for x in events.Scalars("group/zero_std_frac")] == [1.0] * 5
    assert [x.value for x in events.Scalars("losses/grad_norm")] == [0.0] * 5


def test_rounding_does_not_hide_that_members_tie(cli, monkeypatch):
    """Three equal returns of -0.1 have a standard deviation of 2e-17."""
    step = MountainCarEnv.step

    def pays_a_tenth(*args):
        obs, _, *rest = step(*args)
        return obs, -0.1, *rest

    monkeypatch.setattr(MountainCarEnv, "step", pays_a_tenth)
    args = ["--env-id", "MountainCar-v0", "--max-episode-steps", 1, "--group-size", 3]
    out = cli("grpo_rtg", *TINY["grpo_rtg"], *args)[1]
    assert "No signal yet: all advantages are 0, for in each group its members tie." in out


def test_a_lack_of_signal_in_a_later_iteration_is_not_said(cli, monkeypatch):
    module = importlib.import_module("grpo_rtg")
    compute_advantages, calls = module.compute_advantages, []

    def tied_from_the_second_on(*args):
        calls.append(args)
        return compute_advantages(*args) * (len(calls) == 1)

    monkeypatch.setattr(module, "compute_advantages", tied_from_the_second_on)
    out = cli("grpo_rtg", *TINY["grpo_rtg"])[1]
    assert len(calls) > 2 and "No signal" not in out


@pytest.mark.slow
def test_videos_of_training_and_of_a_model_are_written(cli, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    short = ["--capture-video", "--max-episode-steps", 3, "--eval-interval", 200]
    status, _, err = cli("grpo_rtg", *TINY["grpo_rtg"], *short)
    assert status == 0, err
    events = EventAccumulator(str(only_run())).Reload()
    steps = [point.step for point in events.Scalars("eval/episodic_return")]
    assert {path.parent.name for path in only_run().glob("videos/*/*.mp4")} == set(map(str, steps))
    assert len(steps) == 3
    [model] = Path("runs").glob("*/model.pt")
    play = ["--evaluate", model, "--capture-video", "--eval-episodes", 1]
    assert cli("grpo_rtg", *play)[0] == 0 and list(model.parent.glob("videos/*.mp4"))


def test_what_cannot_be_filmed_is_said_in_one_sentence_and_costs_no_model(cli):
    args = ["--env-id", "tests.envs:FromFive-v0", "--capture-video"]
    status, _, err = cli("grpo_rtg", *TINY["grpo_rtg"], *args)
    assert status == 2 and "grpo_rtg.py: Cannot make tests.envs:FromFive-v0: Render mode" in err
    assert "Traceback" not in err and (only_run() / "model.pt").exists()


def test_render_shows_each_evaluation_in_one_window(cli, monkeypatch):
    """In training and of a model."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    modes, make = [], gym.make

    def watched(*args, **kwargs):
        modes.append(kwargs.get("render_mode"))
        return make(*args, **kwargs)

    monkeypatch.setattr(gym, "make", watched)
    assert cli("grpo_rtg", *TINY["grpo_rtg"], "--render", "--max-episode-steps", 3)[0] == 0
    assert modes == [None] * 6 + ["human"]  # two of them to evaluate before training
    modes.clear()
    play = ["--evaluate", only_run() / "model.pt", "--render", "--eval-episodes", 3]
    status, out, _ = cli("grpo_rtg", *play)
    assert status == 0 and "Greedy evaluation, 3 episodes" in out and modes.count("human") == 1


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


@pytest.mark.slow
def test_as_a_process_of_its_own():
    """The real thing once: help and bad input, from another folder."""

    def python(*args):
        command = [sys.executable, ROOT / "grpo_rtg.py", *args]
        return subprocess.run(command, capture_output=True, text=True)

    helped = python("--help")
    assert helped.returncode == 0
    for option in (
        "--env-id",
        "--norm-std, --no-norm-std",
        "--baseline {group,timestep,neighbors}",
    ):
        assert option in helped.stdout
    failed = python("--group-size", "1")
    assert failed.returncode == 2 and failed.stdout == ""
    assert re.fullmatch(r"grpo_rtg.py: --group-size must be from 2 to .*, not 1\.\n", failed.stderr)
