"""What a person types and sees: whole runs, saved models, and one sentence with status 2 for what cannot work."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
GRPO = ["grpo_outcome", "grpo_process", "grpo_rtg"]
SCRIPTS = [*GRPO, "ppo"]
each_script = pytest.mark.parametrize("script", SCRIPTS)
GROUP_OPTIONS = ["--num-groups", "1", "--group-size", "4", "--num-minibatches", "2"]
SHORT = {script: ["--total-timesteps", "600", "--eval-episodes", "3"] for script in SCRIPTS}
for script in SCRIPTS:
    SHORT[script] += GROUP_OPTIONS if script != "ppo" else ["--num-steps", "16"]
TAGS = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate")} | {
    f"losses/{name}" for name in ("policy_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")
}
GRPO_TAGS = {"losses/kl", "group/zero_std_frac", "group/return_std"}
PPO_TAGS = {"losses/value_loss", "losses/explained_variance"}


def logged(run_dir) -> EventAccumulator:
    return EventAccumulator(str(run_dir)).Reload()


@each_script
def test_a_run_prints_logs_and_saves_what_it_did(cli, script):
    status, out, err = cli(script, *SHORT[script])
    assert status == 0, err
    [run_dir] = Path("runs").iterdir()
    assert re.fullmatch(rf"CartPole-v1__{script}__1__\d+", run_dir.name)
    steps = int(re.search(r"Trained (\d+) steps in [\d.]+ s \([\d,]+ steps/s\)", out)[1])
    greedy = float(re.search(r"Greedy evaluation, 3 episodes: return (\S+) ± ", out)[1])
    train = float(re.search(r"Training return, last 100 episodes: (\S+)", out)[1])
    assert 0 < steps <= 600 and 8 <= train <= 500 and 8 <= greedy <= 500
    lines = re.findall(r"^([\d,]+) steps in \d+ s: return ([\d.]+)$", err, re.M)  # for want of a terminal
    assert 2 <= len(lines) <= 10 and all(0 < int(x) <= 600 and float(y) >= 8 for x, y in lines)
    assert "Device: CPU, 1 thread" in out and "solved" not in out  # which three episodes cannot tell
    events = logged(run_dir)
    own = PPO_TAGS if script == "ppo" else GRPO_TAGS
    assert set(events.Tags()["scalars"]) == TAGS | own | {"eval/episodic_return"}
    assert events.Scalars("eval/episodic_return")[-1].value == pytest.approx(greedy, abs=0.01)
    assert events.Scalars("losses/entropy")[-1].step == steps
    if script != "ppo":  # whole episodes: all steps belong to one, so the logged means give the printed one
        lengths, returns = events.Scalars("charts/episodic_length"), events.Scalars("charts/episodic_return")
        assert 4 * sum(x.value for x in lengths) == pytest.approx(steps, rel=1e-6)
        assert np.mean([x.value for x in returns][-25:]) == pytest.approx(train, abs=0.01)
    assert "group_size|4" in str(events.Tensors("hyperparameters/text_summary")[0]) or script == "ppo"


@each_script
def test_a_saved_model_plays_as_it_was_evaluated(cli, script):
    _, out, _ = cli(script, "--env-id", "Pendulum-v1", "--norm-obs", *SHORT[script], "--total-timesteps", 3000)
    [path] = Path("runs").glob("*/model.pt")
    saved = torch.load(path, weights_only=True)
    assert saved["script"] == script and saved["args"]["env_id"] == "Pendulum-v1"
    assert saved["policy"]["obs_count"] > 0 and (saved["policy"]["obs_mean"] != 0).all()
    evaluation = re.compile(r"Greedy evaluation, 3 episodes: return \S+ ± \S+ from \S+ to \S+")
    status, again, _ = cli(script, "--evaluate", path, "--eval-episodes", 3)
    assert status == 0 and evaluation.search(again)[0] == evaluation.search(out)[0]
    assert f"Playing Pendulum-v1 with the policy in {path}, on the CPU" in again
    others = [cli(script, "--evaluate", path, "--eval-episodes", 3, "--seed", 2)[1] for _ in range(2)]
    assert others[0] == others[1] and evaluation.search(others[0])[0] != evaluation.search(out)[0]
    status, sampled, _ = cli(script, "--evaluate", path, "--eval-episodes", 3, "--no-greedy")
    assert status == 0 and evaluation.search(sampled.replace("Sampled", "Greedy"))[0] != evaluation.search(out)[0]
    assert "Sampled evaluation" in sampled


@each_script
def test_the_same_seed_gives_the_same_weights(script):
    module = importlib.import_module(script)
    weights = []
    for seed in (1, 1, 2):
        options = {"num_steps": 16} if script == "ppo" else {"group_size": 4, "num_minibatches": 2}
        run_dir = module.train(module.Args(seed=seed, total_timesteps=600, eval_episodes=1, **options))["run_dir"]
        weights.append(torch.load(run_dir / "model.pt", weights_only=True)["policy"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_a_start_does_not_wait_for_torchs_compiler():
    """Nothing in a run, or in its resumption, imports it: that would be two fifths of the time to the first step."""

    def run(*options):
        command = [sys.executable, "-X", "importtime", ROOT / "grpo_rtg.py", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "Greedy evaluation" in done.stdout, done.stderr
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
        assert "torch.optim" in imported and "torch._dynamo" not in imported

    run(*SHORT["grpo_rtg"])
    [path] = Path("runs").glob("*/checkpoint.pt")
    run("--resume", path, "--total-timesteps", "1200")


def test_as_a_process_of_its_own():
    """The real thing once: help and bad input, from another folder."""

    def python(*args):
        return subprocess.run([sys.executable, ROOT / "grpo_rtg.py", *args], capture_output=True, text=True)

    helped = python("--help")
    assert helped.returncode == 0
    for option in ("--env-id", "--group-size", "--norm-std, --no-norm-std", "--baseline {group,timestep}", "--cuda"):
        assert option in helped.stdout
    failed = python("--group-size", "1")
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr == "grpo_rtg.py: --group-size must be from 2 to 2,147,483,648, not 1.\n"


@each_script
def test_every_option_is_explained(script):
    module = importlib.import_module(script)
    source = (ROOT / f"{script}.py").read_text()
    for name in module.Args.__dataclass_fields__:
        assert re.search(rf"^    {name}: .+ = .+?  # .{{10,}}$", source, re.M), name


BAD_INPUT = {
    "unknown environment": (["--env-id", "CartPol-v1"], r"Did you mean: `CartPole`\?"),
    "unknown version": (["--env-id", "CartPole-v9"], r"`v1`"),
    "malformed id": (["--env-id", "Cart Pole"], r"Malformed environment ID"),
    "unknown module": (["--env-id", "nowhere:Env-v0"], r"No module named 'nowhere'"),
    "unsupported actions": (["--env-id", "tests.envs:UnsupportedActions-v0"], r"MultiDiscrete.*only Discrete and Box"),
    "unsupported observations": (["--env-id", "tests.envs:UnsupportedObs-v0"], r"Graph.*cannot be flattened"),
    "a space of one's own": (["--env-id", "tests.envs:OwnSpace-v0"], r"Cannot make \S+: NotImplementedError"),
    "gamma": (["--gamma", "1.01"], r"--gamma must be from 0 to 1, not 1.01"),
    "clip": (["--clip-coef", "0"], r"--clip-coef must be"),
    "learning rate": (["--learning-rate", "-0.1"], r"--learning-rate must be"),
    "learning rate nan": (["--learning-rate", "nan"], r"--learning-rate must be"),
    "no evaluation": (["--eval-episodes", "0"], r"--eval-episodes must be"),
    "seed": (["--seed", "-1"], r"--seed must be"),
    "video of what cannot be rendered": (
        ["--env-id", "tests.envs:FromFive-v0", "--capture-video"],
        r"Cannot make tests.envs:FromFive-v0: it has no render mode rgb_array",
    ),
    "NaN reward": (
        ["--env-id", "tests.envs:TurnsNaN-v0"],
        r"failed at step 2 \(action \d\) after reset\(seed=\d+\): .*reward nan is NaN",
    ),
    "NaN obs": (
        ["--env-id", "tests.envs:TurnsNaNObs-v0"],
        r"failed at step 2 \(action \d\) after reset\(seed=\d+\): .*observation \[nan nan\]",
    ),
    "no budget": (["--total-timesteps", "0"], r"--total-timesteps must be from"),
    "nothing to render": (["--render"], r"--render needs --evaluate"),
    "nothing to sample": (["--no-greedy"], r"--no-greedy needs --evaluate"),
    "two modes": (["--evaluate", "a.pt", "--resume", "b.pt"], r"--evaluate excludes --resume"),
    "too wide a network": (["--hidden-size", "1000000"], r"--hidden-size must be from 1 to 16,384"),
    "too many threads": (["--num-threads", "2147483648"], r"--num-threads must be from 1 to 1,024"),
    "no model": (["--evaluate", "nowhere.pt"], r"Cannot read nowhere.pt \(No such file or directory\)"),
    "no file to play": (["--evaluate", ""], r"--evaluate and --resume need the name of a file"),
    "no file to resume": (["--resume", ""], r"--evaluate and --resume need the name of a file"),
    "no such module": (
        ["--env-id", "nowhere:Env-v0"],
        r"nowhere.* \(modules are sought beside the script and in PYTHON",
    ),
    "no text number": (["--gamma", "high"], r"Error parsing --gamma"),
}
BAD_GRPO_INPUT = {
    "group size": (["--group-size", "1"], r"--group-size must be from 2"),
    "no groups": (["--num-groups", "0"], r"--num-groups must be from 1"),
    "beta": (["--kl-coef", "-1"], r"--kl-coef must be from 0"),
    "budget": (["--total-timesteps", "40"], r"--total-timesteps 40 allows no iteration"),
    "minibatches": (["--num-minibatches", "5000"], r"--num-minibatches 5000 is more than the \d+ steps"),
    "unseeded": (["--env-id", "tests.envs:IgnoresSeed-v0"], r"ignores reset\(seed=\d+\).*--no-seed-groups"),
}
BAD_PPO_INPUT = {
    "budget": (["--total-timesteps", "1023"], r"--total-timesteps must be from 1,024"),
    "minibatches": (["--num-minibatches", "1025"], r"--num-minibatches must be from 1 to 1,024"),
    "lambda": (["--gae-lambda", "1.5"], r"--gae-lambda must be"),
    "one step": (
        ["--num-envs", "1", "--num-steps", "1", "--num-minibatches", "1"],
        r"--norm-adv needs more than one step",
    ),
    "no environments": (["--num-envs", "0"], r"--num-envs must be from 1"),
}
CASES = [(script, *case) for script in SCRIPTS for case in BAD_INPUT.values()]
CASES += [(script, *case) for script in GRPO for case in BAD_GRPO_INPUT.values()]
CASES += [("ppo", *case) for case in BAD_PPO_INPUT.values()]


@pytest.mark.parametrize(("script", "args", "message"), CASES, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_bad_input_gets_one_sentence_and_status_2(cli, script, args, message):
    status, out, err = cli(script, *args)
    assert status == 2
    assert re.search(message, err), err
    assert "Traceback" not in err
    if "Error parsing" not in err:  # else tyro draws a box
        assert err.startswith(f"{script}.py: ") and err.count("\n") == 1, err
    if "--env-id" in args and "TurnsNaN" not in args[1] and "IgnoresSeed" not in args[1]:
        assert out == "" and not Path("runs").exists()


@each_script
def test_a_fault_has_a_line_of_its_own_below_no_progress_bar(cli, script, monkeypatch):
    class Shown(tqdm):  # as on a terminal
        def __init__(self, **options):
            super().__init__(**options | {"disable": False})

    def update(*_):
        raise FloatingPointError("The update became NaN.")

    module = importlib.import_module(script)
    monkeypatch.setattr(module, "tqdm", Shown)
    monkeypatch.setattr(module, "update", update)
    status, _, err = cli(script)
    assert status == 2 and "0%|" in err
    assert f"{script}.py: The update became NaN." in re.split("[\r\n]", err), err


@each_script
def test_a_missing_extra_names_its_pip_command(cli, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    status, _, err = cli(script, "--env-id", "LunarLander-v3")
    assert status == 2 and 'pip install "gymnasium[box2d]"' in err and err.count("\n") == 1


@each_script
def test_tracking_needs_wandb(cli, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, _, err = cli(script, "--track")
    assert status == 2 and "pip install wandb" in err and not Path("runs").exists()


@each_script
def test_a_runs_folder_that_cannot_be_written_is_found_at_the_start(cli, script):
    Path("runs").write_text("a file where the folder should be")
    status, _, err = cli(script)
    assert status == 2 and re.search(r"Cannot write runs/CartPole-v1__\w+: Not a directory\.", err)


@each_script
def test_files_that_are_no_models(cli, script):
    Path("text.pt").write_text("not a model")
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    torch.save(torch.zeros(3), "tensor.pt")
    cli(script, *SHORT[script])
    [model] = Path("runs").glob("*/model.pt")
    Path("truncated.pt").write_bytes(model.read_bytes()[:-1000])
    saved = torch.load(model, weights_only=True)
    saved["args"]["hidden_size"] = 32
    torch.save(saved, "other_size.pt")
    for name in ("text", "foreign", "tensor", "truncated", "other_size"):
        status, _, err = cli(script, "--evaluate", f"{name}.pt")
        assert status == 2 and err.count("\n") == 1 and re.search(f"Cannot (read|use) {name}.pt", err)
    other = "ppo" if script != "ppo" else "grpo_rtg"
    status, _, err = cli(other, "--evaluate", model)
    assert status == 2 and f"was made by {script}.py" in err


def test_episodes_cut_short_are_not_called_solved(cli):
    """MountainCar's threshold is -110; 50 steps of failing make a return of -50."""
    run = [*SHORT["grpo_rtg"], "--eval-episodes", 100]
    _, out, _ = cli("grpo_rtg", "--env-id", "MountainCar-v0", "--max-episode-steps", 50, *run)
    assert "return -50.00" in out and "solved" not in out
    _, out, _ = cli("grpo_rtg", *run)
    assert "CartPole-v1 is not solved (threshold 475)" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@each_script
def test_cuda_without_a_gpu_warns_and_trains_on_the_cpu(cli, script):
    status, out, err = cli(script, "--cuda", *SHORT[script])
    assert status == 0 and "WARNING" in err and "no GPU" in err and "Device: CPU" in out


@each_script
def test_no_time_limit_is_said(cli, script):
    _, out, _ = cli(script, "--env-id", "tests.envs:NoLimit-v0", *SHORT[script])
    assert "is registered without a time limit: episodes are cut after 1,000 steps" in out
    _, out, _ = cli(script, "--env-id", "tests.envs:NoLimit-v0", "--max-episode-steps", 60, *SHORT[script])
    assert "time limit" not in out


def test_process_supervision_says_once_why_it_learns_nothing_on_cartpole(cli):
    _, out, err = cli("grpo_process", *SHORT["grpo_process"])
    assert (out + err).count("No signal") == 1
    assert "every step paid 1 and an episode's length does not count here" in out + err
    for script in ("grpo_outcome", "grpo_rtg"):
        _, out, err = cli(script, *SHORT[script])
        assert "No signal" not in out + err
        _, out, err = cli(script, *SHORT[script], "--gamma", 0)
        assert "every step paid 1 and an episode's length does not count here" in out + err


@pytest.mark.parametrize("script", GRPO)
def test_tied_groups_say_that_there_is_no_signal(cli, script):
    """Every member of MountainCar's first groups times out with the same return."""
    args = ["--env-id", "MountainCar-v0", "--max-episode-steps", 50, "--gamma", 1.0, *SHORT[script]]
    args += ["--baseline", "timestep"] if script == "grpo_rtg" else []
    _, out, err = cli(script, *args)
    said = re.findall(
        r"No signal at step [\d,]+: all advantages are 0, because the members of every group tied", out + err
    )
    assert len(said) == 1
    [run_dir] = Path("runs").iterdir()
    events = logged(run_dir)
    assert {x.value for x in events.Scalars("group/zero_std_frac")} == {1.0}
    assert {x.value for x in events.Scalars("losses/grad_norm")} == {0.0}


@pytest.mark.parametrize("script", GRPO)
def test_nothing_earned_is_a_tie_and_no_fault_of_process_supervision(cli, script):
    """FrozenLake pays 0 until the goal: episodes of different lengths all earn 0."""
    _, out, err = cli(script, "--env-id", "FrozenLake-v1", "--seed", 3, *SHORT[script])
    assert "because the members of every group tied" in out + err and "does not count" not in out + err


@each_script
def test_an_environment_that_cannot_be_shown_is_not_offered_to_be_watched(cli, script):
    env_id = "docs.examples.grid_world:GridWorld-v0"  # renders text only
    _, out, _ = cli(script, "--env-id", env_id, *SHORT[script])
    assert "Evaluate again: python" in out and "Watch" not in out
    [model] = Path("runs").glob("*/model.pt")
    status, _, err = cli(script, "--evaluate", model, "--env-id", env_id, "--render")
    assert status == 2 and f"Cannot make {env_id}: it has no render mode human" in err and err.count("\n") == 1


@each_script
def test_videos_are_written(cli, script, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    status, out, err = cli(script, "--capture-video", *SHORT[script])
    assert status == 0 and list(Path("runs").glob("*/videos/*.mp4")), err
    [model] = Path("runs").glob("*/model.pt")
    play = ["--evaluate", model, "--capture-video", "--eval-episodes", 1]
    assert cli(script, *play)[0] == cli(script, *play, "--no-greedy", "--seed", 2)[0] == 0
    for folder in ("videos-model-greedy-1", "videos-model-sampled-2"):  # none overwrites another
        assert list((model.parent / folder).glob("*.mp4"))


@each_script
def test_every_environment_that_is_made_is_closed(cli, script, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    made, closed, make = [], set(), gym.make

    def watched(*args, **kwargs):
        env = make(*args, **kwargs)
        close, number = env.close, len(made)
        env.close = lambda: closed.add(number) or close()
        made.append(env)
        return env

    monkeypatch.setattr(gym, "make", watched)
    assert cli(script, "--capture-video", *SHORT[script])[0] == 0
    [model] = Path("runs").glob("*/model.pt")
    assert cli(script, "--evaluate", model, "--eval-episodes", 3)[0] == 0
    assert len(made) > 8 and closed == set(range(len(made)))


def test_render_shows_every_episode_in_one_window(cli, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    cli("grpo_rtg", *SHORT["grpo_rtg"])
    [model] = Path("runs").glob("*/model.pt")
    modes, make = [], gym.make
    monkeypatch.setattr(
        gym, "make", lambda *args, **kwargs: modes.append(kwargs.get("render_mode")) or make(*args, **kwargs)
    )
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    status, out, err = cli("grpo_rtg", "--evaluate", model, "--render", "--eval-episodes", 2)
    assert status == 0 and "Greedy evaluation, 2 episodes" in out and modes.count("human") == 1
    assert "WARNING: no display was found" in err or sys.platform != "linux"
    monkeypatch.setenv("DISPLAY", ":0")
    assert "no display" not in cli("grpo_rtg", "--evaluate", model, "--render", "--eval-episodes", 1)[2]


@each_script
def test_a_fault_in_writing_names_the_file(cli, script, monkeypatch):
    def train(*_):
        raise PermissionError(13, "Permission denied", b"runs/a")  # as TensorBoard's writer has it

    monkeypatch.setattr(importlib.import_module(script), "train", train)
    assert cli(script) == (2, "", f"{script}.py: Cannot write runs/a: Permission denied.\n")


@each_script
def test_help_that_nobody_reads_is_one_sentence(cli, script, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", closed)  # as in `--help | head`
    assert cli(script, "--help") == (2, "", f"{script}.py: Cannot write the output: Broken pipe.\n")


@each_script
def test_videos_that_cannot_be_written_are_refused_before_training(cli, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)  # as if it were not installed
    status, out, err = cli(script, "--capture-video", *SHORT[script])
    assert status == 2 and "moviepy" in err.lower() and err.count("\n") == 1 and out == "" and not Path("runs").exists()


@each_script
def test_a_model_is_played_with_its_own_options_but_for_those_given(cli, script):
    """MountainCar's untrained policies all time out: after 20 steps as in training, after 30, or after its own 200."""
    cli(script, "--env-id", "MountainCar-v0", "--max-episode-steps", 20, "--hidden-size", 8, *SHORT[script])
    [model] = Path("runs").glob("*/model.pt")
    for given, steps in ([], 20), (["--max-episode-steps", 30], 30), (["--max-episode-steps", 0], 200):
        status, out, err = cli(script, "--evaluate", model, "--eval-episodes", 2, *given)
        assert status == 0 and f"Greedy evaluation, 2 episodes: return -{steps}.00 ± 0.00" in out, err
    status, _, err = cli(script, "--evaluate", model, "--env-id", "Acrobot-v1")
    assert status == 2 and err.endswith("was trained on MountainCar-v0, not on Acrobot-v1.\n") and err.count("\n") == 1


@each_script
def test_what_is_tracked_has_the_run_s_name(cli, script, monkeypatch):
    """From inside its folder, too."""
    runs = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: runs.append(options)))
    assert cli(script, "--track", *SHORT[script])[0] == 0
    [run_dir] = Path("runs").resolve().iterdir()
    monkeypatch.chdir(run_dir)
    assert cli(script, "--resume", "checkpoint.pt", "--total-timesteps", 1200)[0] == 0
    assert [run["id"] for run in runs] == [run["name"] for run in runs] == [run_dir.name] * 2
    assert runs[0]["config"]["total_timesteps"] == 600 and runs[1]["config"]["total_timesteps"] == 1200
