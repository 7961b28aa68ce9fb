"""Nothing lost: kills, full disks, foreign files; docs/performance.md gives the promises."""

import functools
import importlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import child
from tests.child import SCRIPTS, TINY, both_kinds, contents, equal, only_run, read

RUN = ["--total-timesteps", 900, "--norm-obs", "--eval-interval", 1, "--checkpoint-interval", 0]
# π_ref is a policy of its own, so that a checkpoint without it would show
REFERENCE = ["--kl-coef", 0.05, "--ref-update-interval", 5]
RUN = {s: [*TINY[s], *RUN, *(REFERENCE if s != "ppo" else [])] for s in SCRIPTS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a script's run that nothing interrupted."""

    @functools.cache
    def get(script):
        folder = tmp_path_factory.mktemp("finished")
        assert child.run(script, *RUN[script], folder=folder) == 0
        return only_run(folder)

    return get


KILLS = [("grpo_rtg", 3), ("ppo", 3)]  # the others share all but their stateless advantages
KILLS += [pytest.param(script, 12, marks=pytest.mark.slow) for script in ("grpo_rtg", "ppo")]


@pytest.mark.parametrize(("script", "kills"), KILLS)
def test_kills_change_nothing(script, kills, finished, tmp_path):
    """SIGKILL at random moments, resumed each time: the same to the bit, curves included.

    ppo.py, whose episodes start anew, takes every iteration once.
    """
    moments, resumed_at, completed = random.Random(0), [], 0
    command = RUN[script]
    while len(resumed_at) < kills or not completed:
        process = child.start(script, *command, folder=tmp_path)
        if len(resumed_at) < kills:
            if moments.random() < 0.8:  # else at once
                child.wait_for_iteration(child.iteration_in(tmp_path) + 1, process, tmp_path)
            process.join(moments.uniform(0, 0.1))
            process.kill()
        process.join()
        if process.exitcode:
            assert process.exitcode == -signal.SIGKILL, (tmp_path / "err.txt").read_text()
            resumed_at.append(child.iteration_in(tmp_path))
            checkpoints = list(tmp_path.glob("runs/*/checkpoint.pt"))
            command = ["--resume", checkpoints[0]] if checkpoints else command
        else:
            [checkpoint] = tmp_path.glob("runs/*/checkpoint.pt")  # beside folders without one
            one, other = contents(checkpoint.parent), contents(finished(script))
            if script == "ppo":
                one, other = ([*x["curves"]["losses/entropy"]] for x in (one, other))
            assert equal(one, other)
            completed, command = completed + 1, RUN[script]
            shutil.rmtree(tmp_path / "runs")
    print(f"{script}: resumed at iterations {resumed_at}; {completed} runs came out the same")
    assert len(set(resumed_at)) > kills / 4  # else the kills came too soon to show anything


def test_ppo_goes_on_from_its_checkpoint(cli):
    """With its weights and its optimizer's state; two who resume it do the same, and it says so."""
    assert cli("ppo", *TINY["ppo"], "--norm-obs", "--total-timesteps", 200)[0] == 0
    saved = read(only_run() / "checkpoint.pt")
    assert saved["optimizer"]["state"][0]["step"] > 0
    shutil.copytree("runs", "again/runs")
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps"]
    status, out, _ = cli("ppo", *resume, 250)  # nothing is left to train
    assert status == 0 and "The episodes that were under way start anew.\n" in out
    resumed = read(only_run() / "checkpoint.pt")
    assert all(equal(saved[name], resumed[name]) for name in ("policy", "optimizer"))
    assert cli("ppo", *resume, 400)[0] == 0
    os.chdir("again")
    assert cli("ppo", *resume, 400)[0] == 0
    assert equal(contents(only_run()), contents(only_run("..")))
    assert read(only_run() / "checkpoint.pt")["progress"]["step"] == 384


STOPS = [("grpo_outcome", "update", 0), ("grpo_process", "update", 0)]
STOPS += [("grpo_rtg", "evaluate", 0), ("grpo_rtg", "save", 0), ("grpo_rtg", "update", 1000)]


@pytest.mark.parametrize(("script", "function", "interval"), STOPS)
def test_what_ctrl_c_prints_makes_a_run_go_on_as_if_nothing_had_happened(
    script, function, interval, cli, monkeypatch, finished
):
    """Ctrl-C in the 8th update, evaluation or writing of a file, or long after a checkpoint."""
    module, calls = importlib.import_module(script), itertools.count(1)
    original = getattr(module, function)

    def interrupted(*args, **kwargs):
        if next(calls) == 8:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, function, interrupted)
    status, out, err = cli(script, *RUN[script], "--checkpoint-interval", interval)
    command = re.search("^If it stops: (python .+)$", out, re.M)[1]
    lines = [x for x in re.split("[\r\n]+", err) if x.strip() and "steps/s" not in x]
    assert status == 130 and lines == [f"Stopped. To go on: {command}"]
    assert child.iteration_in(".") > 3 or interval > 0
    assert cli(script, *command.split()[2:])[0] == 0
    assert equal(contents(only_run()), contents(finished(script)))


def test_a_checkpoint_is_written_at_the_start_at_each_interval_and_at_the_end(cli, monkeypatch):
    module = importlib.import_module("grpo_rtg")
    written, save = [], module.save
    clock = itertools.count(0, 0.5)  # which is read twice or three times an iteration

    def watched(path, args, states):
        written.extend([states["progress"]["iteration"]] if path.name == "checkpoint.pt" else [])
        save(path, args, states)

    monkeypatch.setattr(module, "save", watched)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    for interval in 0, 2.4, 1000:
        written.clear()
        cli("grpo_rtg", *TINY["grpo_rtg"], "--checkpoint-interval", interval)
        last = written[-1]
        assert last > 3 and written[0] == 0
        if interval == 2.4:
            assert 2 < len(written) < last
        else:
            assert written == ([*range(last + 1), last] if interval == 0 else [0, last])


@both_kinds
def test_files_hold_what_is_promised(script, finished):
    """And the optimizer is CleanRL's."""
    run_dir = finished(script)
    kinds = {path.name.partition(".")[2][:10] for path in run_dir.iterdir()}
    assert kinds == {"pt", "out.tfeven"}  # three and the curves
    parts = ["optimizer"] if script == "ppo" else ["reference", "optimizer", "regression"]
    checkpoint = read(run_dir / "checkpoint.pt")
    assert list(checkpoint) == ["script", "args", "policy", *parts, "progress"]
    for name in ("model", "best"):
        assert list(read(run_dir / f"{name}.pt")) == ["script", "args", "policy"]
    [adam] = checkpoint["optimizer"]["param_groups"]
    assert (*adam["betas"], adam["eps"], adam["weight_decay"]) == (0.9, 0.999, 1e-5, 0)


def test_a_resumed_run_given_more_steps_is_the_longer_run(cli):
    """At a constant learning rate; the seconds before the stop count."""
    command = [*TINY["grpo_rtg"], "--no-anneal-lr", "--norm-obs", "--env-id", "Pendulum-v1"]
    assert cli("grpo_rtg", *command)[0] == 0
    whole = only_run().rename("whole")
    assert cli("grpo_rtg", *command, "--total-timesteps", 200)[0] == 0
    short = child.curves(only_run())
    states = read(only_run() / "checkpoint.pt")
    states["progress"]["seconds"] += 5000
    torch.save(states, only_run() / "checkpoint.pt")
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps", 400]
    assert cli("grpo_rtg", *resume)[0] == 0
    assert 5000 < read(only_run() / "checkpoint.pt")["progress"]["seconds"] < 5060
    one, other = contents(whole), contents(only_run())
    # the first part ended with an evaluation, too
    one["curves"]["eval/episodic_return"] |= short["eval/episodic_return"]
    assert equal(one["model"], other["model"]) and equal(one["curves"], other["curves"])
    assert cli("grpo_rtg", *resume)[0] == 0  # nothing is left to train, and nothing changes
    assert equal(contents(only_run()), other)


@both_kinds
def test_evaluation_changes_nothing_and_the_best_policy_is_kept(script, cli, monkeypatch):
    """The second evaluation is made the best one. None is made twice."""
    module = importlib.import_module(script)
    command = [*TINY[script], "--total-timesteps", 1500, "--norm-obs", "--max-episode-steps", 60]
    assert cli(script, *command)[0] == 0
    assert len(child.curves(only_run())["eval/episodic_return"]) == 1  # at the end
    unevaluated = only_run().rename("unevaluated")
    bonus, evaluate, known = iter([0, 500, *[0] * 99]), module.evaluate, []

    def watched(*args):
        known.append(read(only_run() / "checkpoint.pt")["progress"]["eval_step"])
        return evaluate(*args) + next(bonus)

    with monkeypatch.context() as patched:
        patched.setattr(module, "evaluate", watched)
        status, out, _ = cli(script, *command, "--eval-interval", 200)
    assert equal(read(unevaluated / "model.pt")["policy"], read(only_run() / "model.pt")["policy"])
    points = child.curves(only_run())
    evaluations, ends = points["eval/episodic_return"], list(points["charts/learning_rate"])
    due = {min(end for end in ends if end >= time) for time in range(200, ends[-1] + 1, 200)}
    assert list(evaluations) == sorted({*due, ends[-1]})
    assert out.count("Greedy evaluation") == len(evaluations)
    assert known == [0, *list(evaluations)[:-1]]  # a stop between cannot lose what is best
    best = max(evaluations.values())
    assert best == list(evaluations.values())[1]
    assert read(only_run() / "checkpoint.pt")["progress"]["best_return"] == best
    assert f"return {best - 500:.2f} ±" in cli(script, "--evaluate", only_run() / "best.pt")[1]


class TestDisk:
    """No file may exceed a size: the run ends with the error, and what is there stays whole."""

    def test_full_while_a_checkpoint_is_written(self, tmp_path):
        """Curves and model.pt fit, checkpoint.pt does not."""
        assert child.run("grpo_rtg", *TINY["grpo_rtg"], folder=tmp_path) == 0
        run_dir = only_run(tmp_path)
        before = (run_dir / "checkpoint.pt").read_bytes()
        command = ["--resume", run_dir / "checkpoint.pt", "--total-timesteps", 800]
        assert child.run("grpo_rtg", *command, folder=tmp_path, file_limit=20_000) == 1
        error = (tmp_path / "err.txt").read_text()
        assert "OSError: [Errno 27] File too large" in error and "RuntimeError" not in error
        assert (run_dir / "checkpoint.pt").read_bytes() == before
        assert not list(run_dir.glob("*.part"))
        assert child.run("grpo_rtg", *command, folder=tmp_path) == 0

    def test_a_file_is_flushed_before_it_is_renamed(self, monkeypatch):
        """Or a power cut could leave an empty one under the name of the one before."""
        module, calls = importlib.import_module("grpo_rtg"), []
        fsync, rename = os.fsync, Path.replace
        monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync") or fsync(file))
        monkeypatch.setattr(Path, "replace", lambda *x: calls.append("replace") or rename(*x))
        module.save(Path("a.pt"), module.Args(), {})
        assert calls == ["fsync", "replace"] and os.listdir() == ["a.pt"]


class TestFiles:
    """A file that cannot be used is one sentence and status 2, and no file of its folder changes.

    What is asked of it is one script's: load is the same in all.
    """

    UNFIT = "it is not whole, or of other options, another environment or another version$"

    def refused(self, cli, path, why=UNFIT, *args, script="grpo_rtg", options=None):
        for option in options or ["--evaluate", "--resume"]:
            status, _, err = cli(script, option, path, *args)
            assert status == 2 and err.count("\n") == 1, err
            assert err.startswith(f"{script}.py: Cannot use {path}: ")
            assert re.search(why, err.strip()), err
        assert not Path("runs").exists()

    @pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # torch's, of a tensor
    def test_files_of_no_use(self, cli, finished):
        run_dir = finished("grpo_rtg")
        before = {path: path.read_bytes() for path in run_dir.iterdir()}
        whole = run_dir / "checkpoint.pt"
        saved = read(whole)
        Path("folder.pt").mkdir()
        Path("text.pt").write_text("not a model")
        Path("empty.pt").write_text("")
        Path("truncated.pt").write_bytes(whole.read_bytes()[:-2000])
        torch.save(torch.zeros(3), "tensor.pt")
        torch.save({"weights": torch.zeros(3)}, "foreign.pt")
        torch.save(saved | {"args": saved["args"] | {"hidden_size": 32}}, "another_network.pt")
        self.refused(cli, "nowhere.pt", "No such file or directory")
        self.refused(cli, "folder.pt", "Is a directory")
        for name in ("text", "empty", "truncated", "tensor"):
            self.refused(cli, f"{name}.pt", rf"{self.UNFIT}|\[Errno 22\] Invalid argument$")
        self.refused(cli, "foreign.pt", "it has no 'script'; --resume takes")
        self.refused(cli, "another_network.pt")
        for key in saved:
            torch.save({x: y for x, y in saved.items() if x != key}, "another_version.pt")
            lacks = f"it has no '{key}'; --resume takes a checkpoint.pt"
            self.refused(cli, "another_version.pt", lacks, options=["--resume"])
        torch.save(saved | {"progress": saved["progress"] | {"colour": 1}}, "another_version.pt")
        self.refused(cli, "another_version.pt", options=["--resume"])
        torch.save(saved | {"args": saved["args"] | {"colour": 1}}, "another_version.pt")
        self.refused(cli, "another_version.pt")
        self.refused(cli, whole, self.UNFIT, "--env-id", "Acrobot-v1")
        self.refused(cli, whole, self.UNFIT, "--hidden-size", 16)
        self.refused(cli, whole, r"it was made by grpo_rtg\.py$", script="ppo")
        self.refused(cli, run_dir / "model.pt", "it has no 'reference'", options=["--resume"])
        assert {path: path.read_bytes() for path in run_dir.iterdir()} == before

    def test_evaluate_has_the_options_of_its_own_file(self, finished):
        module, run_dir = importlib.import_module("grpo_rtg"), finished("grpo_rtg")
        saved = read(run_dir / "checkpoint.pt")
        torch.save(saved | {"args": saved["args"] | {"norm_obs": False}}, "other.pt")
        given = module.Args(resume="other.pt", evaluate=str(run_dir / "model.pt"))
        assert module.defaults(given).norm_obs

    def test_a_strangers_file_runs_no_code(self, cli, finished, monkeypatch):
        class Attack:
            def __reduce__(self):
                return Path.touch, (Path("attacked"),)

        torch.save({"script": "grpo_rtg", "args": {}, "policy": Attack()}, "attack.pt")
        self.refused(cli, "attack.pt")
        assert not Path("attacked").exists()
        # an environment of the file's choice would import a module of the file's choice
        Path("strange.py").write_text("from pathlib import Path\nPath('attacked').touch()\n")
        monkeypatch.syspath_prepend(".")
        saved = read(finished("grpo_rtg") / "checkpoint.pt")
        saved["args"]["env_id"] = "strange:CartPole-v1"
        torch.save(saved, "attack.pt")
        for option in ("--evaluate", "--resume"):
            status, _, err = cli("grpo_rtg", option, "attack.pt")
            assert status == 2 and not Path("attacked").exists()
            sentence = "attack.pt imports strange:CartPole-v1: if you trust that, give it as --env"
            assert sentence in err and err.count("\n") == 1
        trusted = ["--evaluate", "attack.pt", "--env-id", "strange:CartPole-v1"]
        assert cli("grpo_rtg", *trusted, "--eval-episodes", 1)[0] == 0 and Path("attacked").exists()


@pytest.mark.slow
def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    processes = [child.start("grpo_rtg", *RUN["grpo_rtg"], folder=tmp_path) for _ in range(2)]
    for process in processes:
        process.join()
    one, other = (tmp_path / "runs").iterdir()
    assert equal(contents(one), contents(other))


@pytest.mark.slow
@both_kinds
def test_threads_of_the_environment_change_nothing(script, finished, tmp_path):
    """In a process of its own: OMP_NUM_THREADS is read when torch is loaded."""
    command = [sys.executable, child.ROOT / f"{script}.py", *map(str, RUN[script])]
    environ = os.environ | {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "8"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True)
    assert equal(contents(only_run(tmp_path)), contents(finished(script)))


MEASURE = """
import importlib, sys
module, sizes = importlib.import_module(sys.argv[1]), []
update = module.update
def measured(*args):
    sizes.append(int(open("/proc/self/statm").read().split()[1]))
    if len(sizes) == 601:
        print(sizes[200] * 4096, sizes[600] * 4096, flush=True)
        sys.exit(0)
    return update(*args)
module.update = measured
sizes_of = {"num_envs": 2, "num_steps": 8} if sys.argv[1] == "ppo" else {"num_groups": 1}
module.train(module.Args(env_id="tests.envs:ChooseLength-v0", total_timesteps=10**6, hidden_size=8,
                         update_epochs=1, minibatch_size=10**6, eval_interval=1000, eval_episodes=2,
                         checkpoint_interval=0.1, **sizes_of))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@both_kinds
def test_memory_does_not_grow(script, tmp_path):
    """Resident memory after 600 iterations is within 2% of that after 200."""
    command = [sys.executable, "-c", MEASURE, script]
    environ = os.environ | {"PYTHONPATH": str(child.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    early, late = map(int, done.stdout.split("\n")[-2].split())
    assert late <= 1.02 * early, done.stdout
