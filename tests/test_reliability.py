"""Nothing lost: kills, full disks, foreign files; docs/reliability.md gives the promises."""

import importlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests import child
from tests.child import SCRIPTS, TINY

each_script = pytest.mark.parametrize("script", SCRIPTS)
both_kinds = pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])  # which differ in more than Â
RUN = ["--total-timesteps", 1500, "--norm-obs", "--eval-interval", 1, "--checkpoint-interval", 0]
# π_ref is a policy of its own, so that a checkpoint without it would show
REFERENCE = ["--kl-coef", 0.05, "--ref-update-interval", 5]
RUN = {s: [*TINY[s], *RUN, *(REFERENCE if s != "ppo" else [])] for s in SCRIPTS}


def curves(run_dir: Path) -> dict:
    """The points (step, value) of each curve, less those that depend on the clock."""
    # TensorBoard reads files by name, which has the second, the process and a count of its
    # files: 10 before 9
    for path in run_dir.glob("events.*"):
        start, process, count = path.name.rsplit(".", 2)
        path.rename(path.with_name(f"{start}.{process:0>9}.{count:0>9}"))
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def contents(run_dir: Path) -> dict:
    """Every state in the run's files and every point of its curves, less times and options."""
    files = {name: read(run_dir / f"{name}.pt") for name in ("model", "best", "checkpoint")}
    for states in files.values():
        del states["args"]
    del files["checkpoint"]["seconds"]
    return files | {"curves": curves(run_dir)}


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def equal(one, other) -> bool:
    """Whether nested containers are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def only_run() -> Path:
    [run_dir] = Path("runs").iterdir()
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that nothing interrupted, for each script."""
    runs = {}

    def get(script):
        if script not in runs:
            folder = tmp_path_factory.mktemp("finished")
            assert child.run(script, *RUN[script], folder=folder) == 0
            [runs[script]] = (folder / "runs").iterdir()
        return runs[script]

    return get


KILLS = [("grpo_rtg", 3), ("ppo", 3)]
KILLS += [pytest.param(script, 20, marks=pytest.mark.slow) for script in SCRIPTS]


@pytest.mark.parametrize(("script", "kills"), KILLS)
def test_kills_change_nothing(script, kills, finished, tmp_path):
    """SIGKILL at random moments, resumed each time: the same to the bit, curves included."""
    moments, command, resumed_at, completed = random.Random(0), RUN[script], [], 0
    while len(resumed_at) < kills or not completed:
        process = child.start(script, *command, folder=tmp_path)
        if len(resumed_at) < kills:
            before = iteration_in(tmp_path) if moments.random() < 0.8 else -2  # else go at once
            wait_for(lambda: iteration_in(tmp_path) > before or not process.is_alive())  # noqa: B023
            process.join(moments.uniform(0, 0.1))
            process.kill()
        process.join()
        if process.exitcode:
            assert process.exitcode == -signal.SIGKILL, (tmp_path / "err.txt").read_text()
            resumed_at.append(iteration_in(tmp_path))
            checkpoints = list(tmp_path.glob("runs/*/checkpoint.pt"))
            command = [*RUN[script], *(["--resume", checkpoints[0]] if checkpoints else [])]
        else:
            [run_dir] = [path.parent for path in tmp_path.glob("runs/*/checkpoint.pt")]
            assert equal(contents(run_dir), contents(finished(script)))
            completed, command = completed + 1, RUN[script]
            shutil.rmtree(tmp_path / "runs")
    print(f"{script}: resumed at iterations {resumed_at}; {completed} runs came out the same")
    assert len(set(resumed_at)) > kills / 4  # else the kills came too soon to show anything


def iteration_in(folder: Path) -> int:
    """Of the checkpoint of the run in this folder; -1 before there is one."""
    checkpoints = list(folder.glob("runs/*/checkpoint.pt"))
    return read(checkpoints[0])["iteration"] if checkpoints else -1


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


STOPS = [(script, "update", 0) for script in SCRIPTS]
STOPS += [("grpo_rtg", "evaluate", 0), ("grpo_rtg", "save", 0), ("grpo_rtg", "update", 1000)]


@pytest.mark.parametrize(("script", "function", "interval"), STOPS)
def test_what_a_run_prints_makes_it_go_on_as_if_nothing_had_happened(
    script, function, interval, cli, capsys, monkeypatch, finished
):
    """Ctrl-C in the 8th update, evaluation or writing of a file, or before the 2nd checkpoint."""
    module, calls = importlib.import_module(script), itertools.count(1)
    command, original = [*RUN[script], "--checkpoint-interval", interval], getattr(module, function)
    writers = []

    def interrupted(*args, **kwargs):
        if next(calls) == 8:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    def recorded(*args, **kwargs):
        writers.append(SummaryWriter(*args, **kwargs))
        return writers[-1]

    monkeypatch.setattr(module, function, interrupted)
    monkeypatch.setattr(module, "SummaryWriter", recorded)
    with pytest.raises(KeyboardInterrupt):
        cli(script, *command)
    writers[0].close()  # the points after the last checkpoint reach the disk, too
    said = re.search(r"^If it stops: the same command with (.+)$", capsys.readouterr().out, re.M)
    assert (read(only_run() / "checkpoint.pt")["iteration"] > 3) == (interval == 0)
    assert cli(script, *command, *said[1].split())[0] == 0
    assert equal(contents(only_run()), contents(finished(script)))


def test_a_checkpoint_is_written_at_the_start_at_each_interval_and_at_the_end(cli, monkeypatch):
    module = importlib.import_module("grpo_rtg")
    written, save = [], module.save

    def watched(path, args, **states):
        written.extend([states["iteration"]] if path.name == "checkpoint.pt" else [])
        save(path, args, **states)

    monkeypatch.setattr(module, "save", watched)
    cli("grpo_rtg", *TINY["grpo_rtg"], "--checkpoint-interval", 1000)
    last = written[-1]
    assert written == [0, last] and last > 3
    written.clear()
    cli("grpo_rtg", *TINY["grpo_rtg"], "--checkpoint-interval", 0)
    assert written == [*range(last + 1), last]
    written.clear()
    clock = itertools.count(0, 0.5)  # which is read twice or three times an iteration
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    cli("grpo_rtg", *TINY["grpo_rtg"], "--checkpoint-interval", 2.4)
    assert written[0] == 0 and written[-1] == last and 2 < len(written) < last


@both_kinds
def test_files_hold_what_is_promised(script, finished):
    run_dir = finished(script)
    kinds = {path.name.partition(".")[2][:10] for path in run_dir.iterdir()}
    assert kinds == {"pt", "out.tfeven"}  # three and the curves
    trained = ["policy", "optimizer"] if script == "ppo" else ["policy", "reference", "optimizer"]
    progress = ["iteration", "step", "seconds", "recent", "best", "evaluated"]
    progress += ["untrained", "eval_returns", "kept" if script == "ppo" else "rngs"]
    assert list(read(run_dir / "checkpoint.pt")) == ["script", "args", *trained, *progress]
    assert list(read(run_dir / "model.pt")) == ["script", "args", "policy"]
    assert list(read(run_dir / "best.pt")) == ["script", "args", "policy"]


@pytest.mark.parametrize(
    ("script", "env_id"), [("grpo_rtg", "CartPole-v1"), ("ppo", "Pendulum-v1")]
)
def test_a_resumed_run_given_more_steps_is_the_longer_run(script, env_id, cli):
    """At a constant learning rate. In Pendulum no episode ends, and actions are real numbers."""
    command = [*TINY[script], "--env-id", env_id, "--no-anneal-lr", "--norm-obs"]
    command += ["--max-episode-steps", 0 if script == "ppo" else 20]
    assert cli(script, *command)[0] == 0
    whole = only_run().rename("whole")
    assert cli(script, *command, "--total-timesteps", 200)[0] == 0
    assert read(only_run() / "checkpoint.pt")["step"] <= 200
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps", 400]
    options = ["--env-id", env_id]  # all others are the checkpoint's
    assert cli(script, *resume, *options)[0] == 0
    one, other = contents(whole), contents(only_run())
    assert equal(one["model"], other["model"])
    for tag, points in one["curves"].items():
        extra = {"eval/episodic_return"}  # the first part ended with an evaluation, too
        assert (
            points == other["curves"][tag]
            or tag in extra
            and set(points) < set(other["curves"][tag])
        )
    assert cli(script, *resume, *options)[0] == 0  # nothing is left to train, and nothing changes
    assert equal(contents(only_run()), other)


def test_options_beside_resume_are_heeded(cli):
    assert cli("grpo_rtg", *TINY["grpo_rtg"], "--no-anneal-lr")[0] == 0
    resume = ["--resume", only_run() / "checkpoint.pt", "--total-timesteps", 800]
    assert cli("grpo_rtg", *resume, "--learning-rate", 1e-4)[0] == 0
    rates = [rate for _, rate in curves(only_run())["charts/learning_rate"]]
    default = importlib.import_module("grpo_rtg").Args().learning_rate
    assert rates[0] == pytest.approx(default) and rates[-1] == pytest.approx(1e-4)
    events = EventAccumulator(str(only_run())).Reload()
    options = events.Tensors("hyperparameters/text_summary")
    assert "learning_rate|0.0001" in str(options[-1]) and options[-1].step > 0
    assert read(only_run() / "checkpoint.pt")["args"]["hidden_size"] == 8  # as it was at first


@both_kinds
def test_evaluation_changes_nothing_and_the_best_policy_is_kept(script, cli, monkeypatch):
    """The third evaluation, the second of a policy that has learned, is made the best one."""
    module = importlib.import_module(script)
    command = [*TINY[script], "--total-timesteps", 1500, "--norm-obs", "--max-episode-steps", 60]
    assert cli(script, *command)[0] == 0
    assert len(curves(only_run())["eval/episodic_return"]) == 1  # at the end
    unevaluated = only_run().rename("unevaluated")
    with monkeypatch.context() as patched:
        bonus, evaluate = itertools.chain([0, 0, 500], itertools.repeat(0)), module.evaluate
        patched.setattr(module, "evaluate", lambda *x, **y: evaluate(*x, **y) + next(bonus))
        assert cli(script, *command, "--eval-interval", 200)[0] == 0
    assert equal(read(unevaluated / "model.pt")["policy"], read(only_run() / "model.pt")["policy"])
    evaluations = curves(only_run())["eval/episodic_return"]
    ends = [0, *(step for step, _ in curves(only_run())["charts/learning_rate"])]
    due = {next(end for end in ends if end >= time) for time in range(0, ends[-1], 200)}
    assert [step for step, _ in evaluations] == sorted({*due, ends[-1]})
    best, last = max(mean for _, mean in evaluations), evaluations[-1][1]
    assert read(only_run() / "checkpoint.pt")["best"] == best > last
    play = ["--evaluate", only_run() / "best.pt", "--eval-episodes", 2]
    assert f"return {best - 500:.2f} ±" in cli(script, *play)[1]


def test_the_evaluation_of_the_last_step_is_not_made_twice(finished):
    points = curves(finished("grpo_rtg"))
    ends = [0, *(step for step, _ in points["charts/learning_rate"])]
    assert [step for step, _ in points["eval/episodic_return"]] == ends


class TestDisk:
    """No file may exceed a size: the run ends with the error, and what is there stays whole."""

    def test_full_while_a_checkpoint_is_written(self, tmp_path):
        """Curves and model.pt fit, checkpoint.pt does not."""
        command = [*TINY["grpo_rtg"], "--hidden-size", 32]
        assert child.run("grpo_rtg", *command, folder=tmp_path) == 0
        [run_dir] = (tmp_path / "runs").iterdir()
        before = (run_dir / "checkpoint.pt").read_bytes()
        command += ["--resume", run_dir / "checkpoint.pt", "--total-timesteps", 800]
        assert child.run("grpo_rtg", *command, folder=tmp_path, file_limit=20_000) == 1
        error = (tmp_path / "err.txt").read_text()
        assert "Traceback" in error and "OSError: [Errno 27] File too large" in error
        assert (run_dir / "checkpoint.pt").read_bytes() == before
        assert not list(run_dir.glob("*.part"))
        assert child.run("grpo_rtg", *command, folder=tmp_path) == 0

    def test_full_from_the_start(self, tmp_path):
        assert child.run("grpo_rtg", *TINY["grpo_rtg"], folder=tmp_path, file_limit=3000) == 1
        error = (tmp_path / "err.txt").read_text()
        assert error.count("Traceback") == 1 and "File too large" in error
        assert not list(tmp_path.glob("runs/*/*.p*t"))


UNFIT = "it is incomplete or unfit$"


class TestFiles:
    """A file that cannot be used is one sentence and status 2, and no file of its folder changes.

    What is asked of it is one script's: load is the same in all.
    """

    def refused(self, cli, path, why="", *args, script="grpo_rtg"):
        for option in ("--evaluate", "--resume"):
            status, _, err = cli(script, option, path, *args)
            assert status == 2 and err.count("\n") == 1, err
            assert re.match(f"{script}.py: Cannot use {path} here: {why}", err), err
        assert not Path("runs").exists()

    def test_files_of_no_use(self, cli, finished):
        run_dir = finished("grpo_rtg")
        before = {path: path.read_bytes() for path in run_dir.iterdir()}
        whole = run_dir / "checkpoint.pt"
        Path("folder.pt").mkdir()
        Path("text.pt").write_text("not a model")
        Path("empty.pt").write_text("")
        Path("truncated.pt").write_bytes(whole.read_bytes()[:-2000])
        torch.save(torch.zeros(3), "tensor.pt")
        torch.save({"weights": torch.zeros(3)}, "foreign.pt")
        saved = read(whole)
        torch.save(saved | {"args": saved["args"] | {"colour": 1}}, "unknown_option.pt")
        torch.save(saved | {"args": saved["args"] | {"hidden_size": 32}}, "another_network.pt")
        torch.save(saved | {"policy": {}}, "no_policy.pt")
        self.refused(cli, "nowhere.pt", r".*No such file or directory")
        self.refused(cli, "folder.pt", r".*Is a directory")
        for name in ("text", "empty", "truncated", "tensor", "foreign"):
            self.refused(
                cli, f"{name}.pt", r"(it is incomplete or unfit|\[Errno 22\] Invalid argument)$"
            )
        self.refused(cli, "unknown_option.pt", UNFIT)
        self.refused(cli, "another_network.pt", UNFIT)
        self.refused(cli, "no_policy.pt", UNFIT)
        self.refused(cli, whole, r"it is for CartPole-v1; .*--env-id$", "--env-id", "Acrobot-v1")
        self.refused(cli, whole, UNFIT, "--hidden-size", 16)
        self.refused(cli, whole, r"it was made by grpo_rtg\.py$", script="ppo")
        self.refused(cli, whole, r"it was made by grpo_rtg\.py$", script="grpo_process")
        assert cli("grpo_rtg", "--resume", run_dir / "model.pt")[0] == 2  # which has no optimizer
        assert {path: path.read_bytes() for path in run_dir.iterdir()} == before

    def test_ppo_goes_on_with_as_many_environments(self, cli, finished):
        path = finished("ppo") / "checkpoint.pt"
        status, _, err = cli("ppo", "--resume", path, "--num-envs", 8)
        assert status == 2 and "is of other --num-envs" in err and err.count("\n") == 1

    def test_a_strangers_file_runs_no_code(self, cli, finished, monkeypatch):
        class Attack:
            def __reduce__(self):
                return Path.touch, (Path("attacked"),)

        torch.save({"script": "grpo_rtg", "args": {}, "policy": Attack()}, "attack.pt")
        self.refused(cli, "attack.pt", UNFIT)
        assert not Path("attacked").exists()
        # an environment of the file's choice would import a module of the file's choice
        Path("strange.py").write_text("from pathlib import Path\nPath('attacked').touch()\n")
        monkeypatch.syspath_prepend(".")
        saved = read(finished("grpo_rtg") / "checkpoint.pt")
        saved["args"]["env_id"] = "strange:CartPole-v1"
        torch.save(saved, "attack.pt")
        self.refused(cli, "attack.pt", "it is for strange:CartPole-v1; if you trust it, add that")
        assert not Path("attacked").exists()
        trusted = ["--evaluate", "attack.pt", "--env-id", "strange:CartPole-v1"]
        assert cli("grpo_rtg", *trusted, "--eval-episodes", 1)[0] == 0 and Path("attacked").exists()


@pytest.mark.slow
def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    command = RUN["grpo_rtg"]
    processes = [child.start("grpo_rtg", *command, folder=tmp_path) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 3 and all(len(list(run.iterdir())) == 4 for run in runs)
    assert all(equal(contents(run), contents(runs[0])) for run in runs)


@pytest.mark.slow
@both_kinds
def test_threads_of_the_environment_change_nothing(script, finished, tmp_path):
    """As processes of their own: OMP_NUM_THREADS is read when torch is loaded."""
    for threads in ("1", "8"):
        command = [sys.executable, child.ROOT / f"{script}.py", *map(str, RUN[script])]
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True)
    for run_dir in (tmp_path / "runs").iterdir():
        assert equal(contents(run_dir), contents(finished(script)))


MEASURE = """
import importlib, sys
module, sizes = importlib.import_module(sys.argv[1]), []
update = module.update
def measured(*args):
    sizes.append(int(open("/proc/self/statm").read().split()[1]))
    if len(sizes) == 2001:
        print(sizes[200] * 4096, sizes[2000] * 4096, flush=True)
        sys.exit(0)
    return update(*args)
module.update = measured
sizes_of = {"num_envs": 2, "num_steps": 8} if sys.argv[1] == "ppo" else {"num_groups": 1}
module.train(module.Args(env_id="tests.envs:ChooseLength-v0", total_timesteps=10**6, hidden_size=8,
                         update_epochs=1, num_minibatches=1, eval_interval=1000, eval_episodes=2,
                         checkpoint_interval=0.1, **sizes_of))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@each_script
def test_memory_does_not_grow(script, tmp_path):
    """Resident memory after 2,000 iterations is within 5% of that after 200."""
    command = [sys.executable, "-c", MEASURE, script]
    environ = {**os.environ, "PYTHONPATH": str(child.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    early, late = map(int, done.stdout.split("\n")[-2].split())
    print(f"{script}: {early / 2**20:.1f} MiB after 200 iterations, then {late / 2**20:.1f} MiB")
    assert late <= 1.05 * early
