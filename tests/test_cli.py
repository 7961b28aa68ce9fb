"""What a person types and sees: whole runs, saved models, one sentence for what cannot work."""

import importlib
import re
import shutil
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

from tests.child import ROOT, TINY, both_kinds, curves, env, equal, only_run, read
from tests.envs import FromFive

CHARTS = ["episodic_return", "episodic_length", "SPS", "learning_rate"]
LOSSES = ["policy_loss", "entropy", "approx_kl", "clipfrac", "grad_norm", "minibatches"]
TAGS = {f"charts/{x}" for x in CHARTS} | {f"losses/{x}" for x in LOSSES} | {"eval/episodic_return"}
GRPO_TAGS = {"losses/kl", "group/zero_std_frac", "group/return_std"}
PPO_TAGS = {"losses/value_loss", "losses/explained_variance"}
EVALUATION = re.compile(r"(Greedy|Sampled) evaluation, 2 episodes: return (\S+) ± (\S+)\n")


@both_kinds
def test_a_run_prints_logs_and_saves_what_it_did(cli, script):
    status, out, err = cli(script, *TINY[script])
    run_dir = only_run()
    assert status == 0, err
    assert re.fullmatch(rf"CartPole-v1__{script}__1__[-\d]{{22}}", run_dir.name)
    device, resume, steps, train, greedy, logs, watch = out.splitlines()
    assert device == "Device: CPU" and logs == "Logs:  tensorboard --logdir runs"
    command = rf"python \S*{script}.py"
    checkpoint, model = run_dir / "checkpoint.pt", run_dir / "model.pt"
    assert re.fullmatch(f"If it stops: {command} --resume {checkpoint}", resume)
    assert re.fullmatch(f"Watch: {command} --evaluate {model} --render", watch)
    trained = r"Trained (\d+) of (\d+) steps in [\d.]+ s \([\d,]+ steps/s\)"
    steps, budget = map(int, re.fullmatch(trained, steps).groups())
    episodes, train = re.fullmatch(r"Training return, last (\d+) episodes: (\S+)", train).groups()
    train = float(train)
    greedy = float(EVALUATION.fullmatch(greedy + "\n")[2])
    assert 300 < steps <= budget == 400 and 8 <= train <= 20 and 8 <= greedy <= 20
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
        assert np.mean(list(returns)) == pytest.approx(train, abs=0.01)
        assert int(episodes) == 4 * len(returns)  # under 100
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
    assert cli(script, *play, "--eval-episodes", 0)[0] == 2


@both_kinds
def test_the_learning_rate_falls_linearly_to_0(cli, script):
    """Each iteration has that of the budget left when it begins."""
    cli(script, *TINY[script], "--learning-rate", 0.02)
    rates = curves(only_run())["charts/learning_rate"]
    starts = [0, *rates][:-1]
    expected = [0.02 * (1 - start / 400) for start in starts]
    assert len(rates) > 3 and list(rates.values()) == pytest.approx(expected)


@both_kinds
def test_help_explains_every_option_by_group(cli, script):
    status, out, _ = cli(script, "--help")
    assert re.findall(r"(\w+) options", out) == ["algorithm", "environment", "program"]
    out = " ".join(out.replace("│", " ").split())  # without the frame
    source = (ROOT / f"{script}.py").read_text()
    assert status == 0
    for field in fields(importlib.import_module(script).Args):
        pattern = rf"^(?:    # (.{{10,}})\n)?    {field.name}: .+?(?:  # (.{{10,}}))?$"
        above, beside = re.search(pattern, source, re.M).groups()
        option = f"--{field.name.replace('_', '-')}"
        assert option in out and (above or beside) in out, option


BAD_INPUT = [
    (["--env-id", "CartPol-v1"], r"Did you mean: `CartPole`\?"),
    (["--env-id", "Hopper-v3"], r"Cannot make Hopper-v3.*mujoco"),
    (["--env-id", "nowhere:Env-v0"], r"No module named 'nowhere'"),
    (["--env-id", "tests.envs:Hostile-v0"], "missing 1 .*argument: 'what'"),
    (["--env-kwargs", "{is_slippery: no}"], r"--env-kwargs '\{is_slippery: no\}': .*: Expecting"),
    (["--env-kwargs", "[1]"], r"--env-kwargs '\[1\]': .* must be a mapping, not list"),
    (["--env-kwargs", '{"sise": 3}'], "unexpected keyword argument 'sise'"),
    (env("Choices", kind="none"), r"""--env-kwargs '{"kind": "none"}': KeyError: 'none'"""),
    (env("Odd", what="nowhere.xml"), "Cannot make .*Odd-v0.*: FileNotFoundError: .*nowhere.xml"),
    (env("Odd", what="nothing"), "Cannot make .*Odd-v0.*: AssertionError: there is no nothing"),
    (env("Odd", what="tuple of actions"), "Actions must be Discrete.*Tuple"),
    (env("Odd", what="integer actions"), "Actions must .* Box of floats.*int64"),
    (env("Odd", what="empty range"), "Actions must be .* with low < high.*wrap"),
    (env("Odd", what="mission"), "bservations .*cannot be.*FlatObsWrapper.*'mission'"),
    ([*env("FromFive"), "--render"], "Cannot make .*FromFive-v0.*render_mode"),
    ([*env("Text"), "--render"], "tests.envs:Text-v0 has no render_mode 'human' in its metadata"),
    ([*env("Text"), "--capture-video"], "Text-v0 has no render_mode 'rgb_array' in its metadata"),
    ([*env("Drawn", missing="human"), "--render"], "pygame is not installed"),
    ([*env("FromFive"), "--capture-video"], "Cannot make .*FromFive-v0.*render_mode"),
    ([*env("Drawn", missing="rgb_array"), "--capture-video"], "cairo is not installed"),
    (["--gamma", "1.01"], r"--gamma must be at most 1, not 1.01\."),
    (["--learning-rate", "nan"], r"--learning-rate must be at least 0, not nan\."),
    (["--seed", "-1"], r"--seed must be at least 0, not -1"),
    (["--hidden-size", "1000000"], r"--hidden-size must be at most 16,384"),
    (["--num-threads", "2147483648"], r"--num-threads must be at most 1,024"),
    (["--render", "--capture-video"], "--render and --capture-video exclude each other"),
    (["--minibatch-size", "0"], "--minibatch-size must be at least 1"),
    (["--group-size", "1"], r"--group-size must be at least 2, not 1\."),
    (["--total-timesteps", "2"], "An iteration takes more steps than --total"),
    (["--evaluate", ""], r"Cannot use : "),
]
BAD_INPUT = [("grpo_rtg", *case) for case in BAD_INPUT] + [
    ("ppo", ["--minibatch-size", "0"], "--minibatch-size must be at least 1"),
    ("ppo", ["--gae-lambda", "1.5"], "--gae-lambda must be at most 1, not 1.5"),
    ("ppo", ["--num-envs", "0"], "--num-envs must be at least 1"),
    ("ppo", ["--num-envs", "1", "--num-steps", "1"], "--num-steps must be at least 2"),
    ("ppo", ["--total-timesteps", "1023"], "An iteration takes more steps than --total-timesteps"),
]


@pytest.mark.filterwarnings("ignore:.*is out of date")  # Gymnasium's, of Hopper-v3
@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
@pytest.mark.parametrize(("script", "args", "message"), BAD_INPUT, ids=str)
def test_bad_input_gets_one_sentence_and_status_2(refused, script, args, message):
    refused(message, script, *args)
    assert "An iteration" in message or not Path("runs").exists()


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
    assert status == 0 and "WARNING: --cuda was asked for, but torch " in out
    assert "Device: CPU\n" in out


@both_kinds
def test_torchrun_needs_a_gpu_for_each_process(script, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    refused("a GPU for each of", script, "--cuda", *TINY[script])


def test_tied_groups_say_once_that_there_is_no_signal(cli):
    """Every member of MountainCar's groups times out with the same return."""
    args = ["--env-id", "MountainCar-v0", "--gamma", 1.0, "--baseline", "timestep"]
    out = cli("grpo_rtg", *TINY["grpo_rtg"], *args)[1]
    assert out.count("All advantages of the first iteration are 0: nothing to learn from (") == 1
    points = curves(only_run())
    assert list(points["group/zero_std_frac"].values()) == [1.0] * 5
    assert list(points["losses/grad_norm"].values()) == [0.0] * 5


@both_kinds
def test_every_environment_that_is_stepped_is_closed(cli, script, monkeypatch):
    stepped, closed, step = set(), set(), FromFive.step
    monkeypatch.setattr(FromFive, "step", lambda env, x: stepped.add(env) or step(env, x))
    monkeypatch.setattr(FromFive, "close", lambda env: closed.add(env))
    assert cli(script, *TINY[script], *env("FromFive"), "--eval-interval", 200)[0] == 0
    assert len(stepped) >= 8 and stepped <= closed


def test_arguments_of_the_environment_are_an_option_and_stay_with_the_model(cli):
    """On a map of two fields, without slipping, one step to the right pays 1."""
    kwargs = ["--env-id", "FrozenLake-v1", "--env-kwargs", '{"is_slippery": false, "desc": ["SG"]}']
    assert cli("grpo_rtg", *TINY["grpo_rtg"], *kwargs)[0] == 0
    status, out, _ = cli("grpo_rtg", "--evaluate", only_run() / "model.pt")
    assert status == 0 and "return 1.00 ± 0.00" in out


@both_kinds
def test_a_file_is_all_that_is_needed(script, cli):
    """To play and to go on."""
    assert cli(script, *TINY[script], "--env-id", "Acrobot-v1", "--no-anneal-lr")[0] == 0
    play = ["--evaluate", only_run() / "model.pt"]
    for options, steps in ([], 20), (["--max-episode-steps", 30], 30):  # instead of its own
        assert f"return -{steps}.00 ±" in cli(script, *play, *options)[1]
    assert cli(script, "--resume", only_run() / "checkpoint.pt")[0] == 0
    saved = read(only_run() / "model.pt")  # of a script without this option, it has the default
    del saved["args"]["clip_coef"]
    torch.save(saved, "older.pt")
    assert cli(script, "--evaluate", "older.pt")[0] == 0
    # and the options that are given beside it are heeded
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps", 800]
    assert "return -20.00 ±" in cli(script, *resume, "--learning-rate", 1e-4)[1]
    rates = [*curves(only_run())["charts/learning_rate"].values()]
    expected = importlib.import_module(script).Args().learning_rate, 1e-4
    assert (rates[0], rates[-1]) == pytest.approx(expected)
    assert read(only_run() / "checkpoint.pt")["args"]["hidden_size"] == 8  # as it was at first


def test_the_printed_commands_work(cli):
    """They repeat an environment's module, which a file alone must not import.

    And they show only what can be shown.
    """
    _, out, _ = cli("grpo_rtg", *TINY["grpo_rtg"], *env("Countdown"))
    assert re.search("^Play:  .* --env-id tests.envs:Countdown-v0$", out, re.M)
    shutil.rmtree("runs")
    _, out, _ = cli("grpo_rtg", *TINY["grpo_rtg"], *env("Drawn"))
    resume = re.search(r"^If it stops: python \S+\.py (.+)$", out, re.M)[1].split()
    watch = re.search(r"^Watch: python \S+\.py (.+)$", out, re.M)[1].split()
    assert resume[2:] == watch[2:4] == ["--env-id", "tests.envs:Drawn-v0"]
    assert watch[4:] == ["--render"]
    for command in resume, watch:
        assert cli("grpo_rtg", *command)[0] == 0


@both_kinds
def test_environments_that_draw_from_numpys_own_generator_are_reproducible(script, cli):
    """And a GRPO run resumes exactly; what an evaluation draws changes nothing."""
    command = [*TINY[script], *env("NumpyRandom", in_resets=script == "ppo"), "--no-anneal-lr"]
    runs = []
    for options in [], ["--eval-interval", 50], ["--total-timesteps", 200]:
        np.random.seed(len(runs))
        assert cli(script, *command, *options)[0] == 0
        runs.append(only_run().rename(f"run-{len(runs)}"))
    one, same = (read(path / "model.pt")["policy"] for path in runs[:2])
    assert equal(one, same)
    resume = ["--resume", runs[2] / "checkpoint.pt", "--env-id", "tests.envs:NumpyRandom-v0"]
    assert cli(script, *resume, "--total-timesteps", 400)[0] == 0
    assert script == "ppo" or equal(one, read(runs[2] / "model.pt")["policy"])


def test_a_model_is_shown_in_five_episodes(cli, monkeypatch):
    """And a hundred are played where nobody watches; in training likewise."""
    modes, make = [], gym.make

    def watched(*args, **kwargs):
        modes.append(kwargs.get("render_mode"))
        return make(*args, **kwargs)

    monkeypatch.setattr(gym, "make", watched)
    options = ["--num-groups", 1, "--total-timesteps", 100, *env("Drawn"), "--render"]
    assert "Greedy evaluation, 5 episodes" in cli("grpo_rtg", *options)[1]
    assert modes.count("human") == 2  # a probe, and one window for all episodes
    play = ["--evaluate", only_run() / "model.pt", "--env-id", "tests.envs:Drawn-v0", "--render"]
    assert "Greedy evaluation, 5 episodes" in cli("grpo_rtg", *play)[1]
    assert "Greedy evaluation, 3 episodes" in cli("grpo_rtg", *play, "--eval-episodes", 3)[1]


@pytest.mark.slow
def test_videos_say_where_they_are_and_are_not_overwritten(cli):
    options = ["--capture-video", "--eval-interval", 200, *env("Drawn")]
    status, out, err = cli("grpo_rtg", *TINY["grpo_rtg"], *options)
    assert status == 0, err
    play = ["--evaluate", only_run() / "model.pt", "--env-id", "tests.envs:Drawn-v0"]
    for _ in range(2):
        out += cli("grpo_rtg", *play, "--capture-video", "--eval-episodes", 1)[1]
    folders = re.findall("^Videos: (.+)$", out, re.M)
    assert len(set(folders)) == len(folders) == out.count("Greedy evaluation") == 4
    assert all(list(Path(folder).glob("*.mp4")) for folder in folders)


@pytest.mark.slow
def test_a_start_does_not_wait_for_torchs_compiler(cli):
    """Nothing in a resumed run, which does all that others do, imports it: that takes a second."""
    assert cli("grpo_rtg", *TINY["grpo_rtg"])[0] == 0
    command = [sys.executable, "-X", "importtime", ROOT / "grpo_rtg.py", "--total-timesteps", "800"]
    command += ["--resume", only_run() / "checkpoint.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Greedy evaluation" in done.stdout, done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
    assert "torch.optim" in imported and "torch._dynamo" not in imported
