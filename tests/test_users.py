"""What users expect, a test for each surprise that one of them met in the first ten minutes.

The rows are those of issue 40; each has the smallest input that shows it.
"""

import importlib
import os
import re
import signal
import time
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests import child
from tests.child import TINY, both_kinds, curves, each_script, env, equal, only_run, read
from tests.envs import Choices

SEEDS = [("grpo_rtg", 1), ("grpo_rtg", 2), ("grpo_rtg", 3), ("ppo", 1)]


def greedy(script: str, *args) -> float:
    """The mean return of the evaluation after a run with the default options but for these."""
    assert child.run(script, *args, folder=".") == 0, Path("err.txt").read_text()
    return evaluation(Path("out.txt").read_text())


def evaluation(out: str) -> float:
    return float(re.search(r"Greedy evaluation, \d+ episodes: return (\S+) ±", out)[1])


def make(name: str):
    """Options, an environment of tests/envs.py and a policy of grpo_rtg.py."""
    args = grpo_rtg.Args(env_id=f"tests.envs:{name}-v0", hidden_size=8, eval_episodes=2)
    made = grpo_rtg.make_env(args)
    return args, made, grpo_rtg.Policy(made.observation_space, made.action_space, args)


# Actions and observations


@pytest.mark.parametrize(
    ("script", "kind"), [*(("grpo_rtg", kind) for kind in Choices.kinds), ("ppo", "MultiDiscrete")]
)
def test_actions_of_several_choices_are_learned(script, kind, cli):
    """In any shape and from any start: the environment checks that its space has them."""
    options = ["--num-groups", 1, "--group-size", 8]
    if script == "ppo":
        options = ["--num-envs", 4, "--num-steps", 32]
    options += ["--total-timesteps", 2000, "--learning-rate", 0.02, "--eval-episodes", 2]
    options += ["--update-epochs", 4, "--num-minibatches", 2]
    status, out, err = cli(script, *options, *env("Choices", kind=kind))
    assert status == 0 and evaluation(out) > 9, err


def test_bounded_actions_are_rescaled():
    """To [-1, 1]: as they are, a mean near 0 would be near one end of the range."""
    _, made, _ = make("Dial")
    made.reset(seed=0)
    for given, reward in (-1, 0), (0, 1 - 200 / 700), (0.4, 1), (1, 1 - 300 / 700):
        [action] = grpo_rtg.to_env(np.array([[given]]), made.action_space)
        assert made.step(action)[1] == pytest.approx(reward, abs=1e-6)


@pytest.mark.slow
@both_kinds
def test_a_dial_is_learned(script):
    assert greedy(script, *env("Dial"), "--total-timesteps", 50_000) > 9.5  # of 10


@pytest.mark.slow
@pytest.mark.parametrize(("script", "seed"), SEEDS)
def test_what_has_been_solved_is_not_ruined(script, seed):
    """Without a bound on the KL divergence an update ends far from where it began."""
    assert greedy(script, *env("Repeat"), "--seed", seed) > -2  # untrained -11
    assert max(curves(only_run())["losses/approx_kl"].values()) < 0.2


@pytest.mark.slow
def test_a_penalty_towards_a_fixed_reference_does_not_end_in_nan():
    """Log-ratios are bounded; test_loss.py has the small input."""
    assert greedy("grpo_rtg", *env("Repeat"), "--kl-coef", 0.04, "--ref-update-interval", 0) > -10


@both_kinds
def test_episodes_of_one_step_get_few_updates(script, cli, monkeypatch):
    """32 steps got 64 of them: a minibatch has 32 steps or more, or all if there are fewer."""
    module, sizes = importlib.import_module(script), []
    name = "ppo_loss" if script == "ppo" else "grpo_loss"
    loss = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x: sizes.append(len(x[1]["obs"])) or loss(*x))
    options = ["--group-size", 52, "--num-minibatches", 8, "--target-kl", 0]
    if script == "ppo":
        options[:2] = ["--num-steps", 13]  # of 4 environments
    options += ["--total-timesteps", 52, *env("Match")]
    assert cli(script, *TINY[script], *options)[0] == 0 and sizes == [52, 52]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "seed"), SEEDS)
def test_episodes_of_one_step_are_learned(script, seed):
    assert greedy(script, *env("Match"), "--total-timesteps", 20_000, "--seed", seed) == 1


@each_script
def test_the_first_standard_deviation_is_an_option(script, cli):
    options = ["--env-id", "Pendulum-v1", "--log-std-init", -2, "--learning-rate", 0]
    assert cli(script, *TINY[script], *options)[0] == 0
    assert read(only_run() / "model.pt")["policy"]["log_std"].tolist() == [-2]


def test_images_stay_bytes():
    """Until the network, in what a rollout keeps and in a batch."""
    args, made, policy = make("Picture")
    rng = np.random.default_rng(0)
    envs = [made] + [make("Picture")[1] for _ in range(3)]
    episodes = grpo_rtg.collect_groups(envs, policy, 2, rng)
    batch = grpo_rtg.make_batch(episodes, torch.zeros(episodes.mask.shape), policy, policy, args)
    critic = ppo.ActorCritic(made.observation_space, made.action_space, ppo.Args())
    steps = ppo.collect_steps(ppo.Running(envs, rng), critic, 15, rng)
    for obs in episodes.obs, batch["obs"], steps.obs, steps.next_obs:
        assert obs.dtype == torch.uint8 and obs.shape[-1] == 108 and obs.max() > 250


def test_an_evaluation_keeps_no_observations():
    """Only the batch that is acted on is alive, and sometimes the one before."""
    args, _, policy = make("Picture")
    args.eval_episodes = 45
    act, batches, alive = policy.act, [], []

    def watched(obs, rng):
        batches.append(weakref.ref(obs))
        alive.append(sum(batch() is not None for batch in batches))
        return act(obs, rng)

    policy.act = watched
    grpo_rtg.evaluate(policy, args, seed=0)
    assert len(alive) == 30 and max(alive) <= 2


def test_a_constant_column_is_normalized_to_0():
    """1,000.1 in float32, over batches of many sizes."""
    stats = grpo_rtg.RunningMeanVar(1)
    column = torch.full((9000, 1), 1000.1)
    for size in (7, 100, 3000, 9000):
        stats.update(column[:size])
        assert stats.normalize(column).abs().max() < 1e-6


# Options, files and commands


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
        assert evaluation(cli(script, *play, *options)[1]) == -steps
    assert cli(script, "--resume", only_run() / "checkpoint.pt")[0] == 0
    # and the options that are given beside it are heeded
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps", 800]
    assert evaluation(cli(script, *resume, "--learning-rate", 1e-4)[1]) == -20
    rates = [*curves(only_run())["charts/learning_rate"].values()]
    expected = importlib.import_module(script).Args().learning_rate, 1e-4
    assert (rates[0], rates[-1]) == pytest.approx(expected)
    assert read(only_run() / "checkpoint.pt")["args"]["hidden_size"] == 8  # as it was at first


def test_the_printed_commands_work(cli):
    """They repeat an environment's module, which a file alone must not import."""
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


# What is shown


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


def test_an_evaluation_of_more_than_a_second_shows_a_bar(capsys):
    args, _, policy = make("FromFive")
    act = policy.act
    for seconds in 0, 0.12:  # a step
        policy.act = lambda *x: time.sleep(seconds) or act(*x)  # noqa: B023
        grpo_rtg.evaluate(policy, args, seed=0)
        assert ("Evaluating: " in capsys.readouterr().err) == (seconds > 0)


def test_ctrl_c_is_one_line(tmp_path):
    """Of a process of its own; the line has the command to go on, where there is one."""
    process = child.start("grpo_rtg", "--total-timesteps", 10**7, folder=tmp_path)
    child.wait_for(lambda: (tmp_path / "out.txt").exists() and "If it st" in out("out"))
    process.join(0.2)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    command = re.search("If it stops: (.+)\n", out("out"))[1]
    lines = [x for x in re.split("[\r\n]+", out("err")) if x.strip() and "steps/s" not in x]
    assert process.exitcode == 130 and lines == [f"Stopped. To go on: {command}"]


def out(name: str) -> str:
    return Path(f"{name}.txt").read_text()


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")  # Gymnasium's
@both_kinds
@pytest.mark.parametrize("option", ["--render", "--capture-video"])
def test_what_cannot_be_shown_is_said_before_training(option, script, refused):
    options = [*TINY[script], *env("FromFive"), option]
    refused("Cannot make .*FromFive-v0.*render_mode", script, *options)
    assert not Path("runs").exists()


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


# One sentence

SENTENCES = {
    "JSON that is none": (["--env-kwargs", "{is_slippery: no}"], "--env-kwargs '{is_s.*Expecting"),
    "JSON of a list": (["--env-kwargs", "[1]"], r"--env-kwargs '\[1\]'"),
    "JSON null": (["--env-kwargs", "null"], "--env-kwargs 'null'"),
    "an argument too many": (["--env-kwargs", '{"sise": 3}'], "unexpected keyword argument 'sise'"),
    "an argument too few": (["--env-id", "tests.envs:Hostile-v0"], "missing 1 .*argument: 'what'"),
    "a Tuple of actions": (env("Odd", what="tuple of actions"), "Actions must be Discrete.*Tuple"),
    "integer actions": (env("Odd", what="integer actions"), "Actions must .* Box of floats.*int64"),
    "low = high": (env("Odd", what="empty range"), "Actions must be .* with low < high.*wrap"),
    "a Graph": (env("Odd", what="graph"), "bservations .*cannot be flattened: .*FlatObsWrapper"),
    "a mission": (env("Odd", what="mission"), "bservations .*cannot be.*FlatObsWrapper.*'mission'"),
    "a reward of two": (env("Hostile", what="reward of two"), "A reward must be one number"),
    "no thread": (["--num-threads", 0], "--num-threads must be from 1"),
}


@both_kinds
@pytest.mark.parametrize("case", SENTENCES)
def test_one_sentence_says_what_is_wrong(script, case, refused):
    args, message = SENTENCES[case]
    refused(message, script, *TINY[script], *args)


def test_ppo_needs_two_steps_to_compare(refused):
    refused("--num-steps must be from 2", "ppo", "--num-envs", 1, "--num-steps", 1)


class TestAnotherVersion:
    """Of the script or its options: a checkpoint is refused in one sentence."""

    @pytest.fixture
    def checkpoint(self, cli):
        assert cli("grpo_rtg", *TINY["grpo_rtg"], "--baseline", "timestep")[0] == 0
        run_dir = only_run()
        status, _, err = cli("grpo_rtg", "--evaluate", run_dir / "model.pt", "--eval-episodes", 0)
        assert status == 2 and re.fullmatch("grpo_rtg.py: --eval-episodes must be from 1 .*\n", err)
        run_dir.parent.rename("finished")
        return read(Path("finished", run_dir.name, "checkpoint.pt"))

    def test_something_is_missing_or_unknown(self, checkpoint, refused):
        files = [{x: y for x, y in checkpoint.items() if x != key} for key in checkpoint]
        args, progress = checkpoint["args"], checkpoint["progress"]
        files += [checkpoint | {"args": args | {"colour": 1}}]
        files += [checkpoint | {"progress": progress | {"colour": 1}}]
        files += [checkpoint | {"args": {x: y for x, y in args.items() if x != "gamma"}}]
        for file in files:
            torch.save(file, "old.pt")
            sentence = "Cannot use old.pt: it (is not whole, or of|was made by) .*another version"
            refused(sentence, "grpo_rtg", "--resume", "old.pt")

    def test_another_baseline(self, checkpoint, refused):
        torch.save(checkpoint, "old.pt")
        resume = ["--resume", "old.pt", "--baseline", "regression"]
        refused("Cannot use old.pt: .* of other options", "grpo_rtg", *resume)
