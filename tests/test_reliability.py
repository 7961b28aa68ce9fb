"""Nothing lost: kills, signals, full disks, foreign files, two runs at once; docs/reliability.md gives the promises."""

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

from tests import child

SCRIPTS = child.SCRIPTS
each_script = pytest.mark.parametrize("script", SCRIPTS)
SMALL = {script: ["--num-groups", 1, "--group-size", 4, "--num-minibatches", 2] for script in SCRIPTS}
SMALL["ppo"] = ["--num-envs", 4, "--num-steps", 32]
RUN = ["--total-timesteps", 6000, "--max-episode-steps", 40, "--norm-obs", "--eval-episodes", 2, "--eval-interval", 500]
RUN = {script: [*RUN, "--checkpoint-interval", 3, "--update-epochs", 2, *SMALL[script]] for script in SCRIPTS}


def contents(run_dir: Path) -> tuple[dict, dict]:
    """Every state in the run's files, and every point of its curves, less what depends on the clock."""
    states = {}
    for name in ("model", "best", "checkpoint"):
        saved = torch.load(run_dir / f"{name}.pt", weights_only=True)
        del saved["run"]["seconds"], saved["args"]
        saved["run"]["scalars"].pop("charts/SPS", None)
        if name == "model":  # a kill after the final evaluation makes it be written again, with that evaluation in it
            saved["run"]["scalars"].pop("eval/episodic_return", None)
            del saved["run"]["best"]
        states[name] = saved
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
    return states, {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def equal(one, other) -> bool:
    """Whether nested containers are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


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


@pytest.fixture(scope="module")
def unbroken(finished):
    """The contents of that folder."""
    return lambda script: contents(finished(script))


@each_script
def test_twenty_kills_change_nothing(script, unbroken, tmp_path):
    """SIGKILL at 20 random moments, resumed each time: the same weights, to the bit, and the same curves."""
    moments, patience, went_on_from, finished, command = random.Random(0), 0.25, [], 0, RUN[script]
    while len(went_on_from) < 20 or not finished:
        process = child.start(script, *command, folder=tmp_path)
        if len(went_on_from) < 20:
            wait_for(lambda: "Device" in text(tmp_path, "out"))
            process.join(moments.uniform(0, patience))
        else:
            process.join()
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), text(tmp_path, "err")
        checkpoints = list(tmp_path.glob("runs/*/checkpoint.pt"))
        if process.exitcode:
            command = ["--resume", checkpoints[0]] if checkpoints else RUN[script]
            iteration = torch.load(checkpoints[0], weights_only=True)["run"]["iteration"] if checkpoints else 0
            # a busy machine comes no further in this time: give it more until it does
            patience = patience * 1.5 if iteration in went_on_from[-1:] else 0.25
            went_on_from.append(iteration)
        else:
            states, curves = contents(checkpoints[0].parent)
            assert equal(states, unbroken(script)[0]) and curves == unbroken(script)[1]
            finished, command = finished + 1, RUN[script]
            shutil.rmtree(tmp_path / "runs")
    print(
        f"{script}: 20 kills, resumed at iterations {went_on_from}, {finished} runs finished as if nothing had happened"
    )
    assert len(set(went_on_from)) >= 5  # else the kills came too soon to show anything


@each_script
def test_the_end_of_a_run_is_logged_once(script, unbroken, cli, monkeypatch):
    """Stopped between the last evaluation, which is logged, and the checkpoint that would say so."""
    module = importlib.import_module(script)
    save = module.save

    def failing(path, *args, **parts):
        if path.name == "checkpoint.pt" and (path.parent / "model.pt").exists():
            raise OSError(28, "No space left on device", path)
        save(path, *args, **parts)

    monkeypatch.setattr(module, "save", failing)
    status, _, err = cli(script, *RUN[script], "--checkpoint-interval", 1)  # the last checkpoint is at the last step
    assert status == 2 and "No space left on device" in err
    monkeypatch.setattr(module, "save", save)
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    assert cli(script, "--resume", checkpoint)[0] == 0
    assert equal(contents(checkpoint.parent), unbroken(script))


def text(folder: Path, name: str) -> str:
    return (folder / f"{name}.txt").read_text()


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "number"), [(script, signal.SIGINT) for script in SCRIPTS] + [("ppo", signal.SIGTERM)]
)
def test_a_signal_saves_and_says_how_to_go_on(script, number, unbroken, tmp_path):
    process = child.start(script, *RUN[script], folder=tmp_path)
    wait_for(lambda: list(tmp_path.glob("runs/*/best.pt")))  # the first iterations are done
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    assert "Stopping after this iteration or evaluation; once more stops at once." in text(tmp_path, "err")
    assert "Traceback" not in text(tmp_path, "err")
    command = re.search(rf"Resume: python \S*{script}.py (--resume \S+/checkpoint.pt)$", text(tmp_path, "err"), re.M)[1]
    assert child.run(script, *command.split(), folder=tmp_path) == 0
    [run_dir] = (tmp_path / "runs").iterdir()
    assert equal(contents(run_dir), unbroken(script))


def test_a_signal_is_heeded_when_nobody_reads(tmp_path):
    """As in `python grpo_rtg.py 2>&1 | tee log`, where Ctrl-C ends tee as well: the checkpoint is still written."""
    command = [sys.executable, child.ROOT / "grpo_rtg.py", *map(str, RUN["grpo_rtg"]), "--checkpoint-interval", "1000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("runs/*/best.pt")))
    process.stdout.close()
    process.stderr.close()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait()
    [checkpoint] = tmp_path.glob("runs/*/checkpoint.pt")
    assert torch.load(checkpoint, weights_only=True)["run"]["iteration"] > 0


@each_script
def test_the_model_is_saved_when_nobody_reads(script, tmp_path):
    """As in `python grpo_rtg.py | head -1` with PYTHONUNBUFFERED=1."""
    command = [sys.executable, "-u", child.ROOT / f"{script}.py", *map(str, RUN[script])]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "Device" in process.stdout.readline()
    process.stdout.close()
    assert "Cannot write the output: Broken pipe." in process.stderr.read() and process.wait() == 2
    [model] = tmp_path.glob("runs/*/model.pt")
    assert child.run(script, "--evaluate", model, folder=tmp_path) == 0


@each_script
def test_a_changed_learning_rate_is_heeded(script, tmp_path):
    constant = [*RUN[script], "--no-anneal-lr", "--total-timesteps", 2000]
    assert child.run(script, *constant, folder=tmp_path) == 0
    [checkpoint] = tmp_path.glob("runs/*/checkpoint.pt")
    command = ["--resume", checkpoint, "--total-timesteps", 4000, "--learning-rate", 1e-4]
    assert child.run(script, *command, folder=tmp_path) == 0
    assert contents(checkpoint.parent)[1]["charts/learning_rate"][-1][1] == pytest.approx(1e-4)


def test_the_second_signal_stops_at_once(tmp_path):
    """The environment's step takes an hour; the first Ctrl-C waits for it, the second does not."""
    process = child.start("grpo_rtg", "--env-id", "tests.envs:StepSleepsForAnHour-v0", folder=tmp_path)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")))
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(0.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(5)
    assert process.exitcode == -signal.SIGINT  # which a shell shows as 130


@each_script
def test_a_resumed_run_can_be_given_more_steps(script, tmp_path):
    """At a constant learning rate a run of 3,000 steps resumed to 6,000 is a run of 6,000."""
    constant = [*RUN[script], "--no-anneal-lr"]
    assert child.run(script, *constant, folder=tmp_path) == 0
    [whole] = (tmp_path / "runs").iterdir()
    assert child.run(script, *constant, "--total-timesteps", 3000, folder=tmp_path) == 0
    [part] = set((tmp_path / "runs").iterdir()) - {whole}
    assert torch.load(part / "checkpoint.pt", weights_only=True)["run"]["step"] <= 3000
    command = ["--resume", part / "checkpoint.pt", "--total-timesteps", 6000]
    assert child.run(script, *command, folder=tmp_path) == 0
    assert "Nothing is left to train" not in text(tmp_path, "err")
    options = EventAccumulator(str(part)).Reload().Tensors("hyperparameters/text_summary")
    assert "total_timesteps|6000" in str(options[-1]) and options[-1].step > 0
    weights = [torch.load(run / "model.pt", weights_only=True)["policy"] for run in (whole, part)]
    assert equal(*weights)
    training, evaluation = (
        [contents(run)[1][tag] for run in (whole, part)] for tag in ("charts/episodic_return", "eval/episodic_return")
    )
    assert training[0] == training[1]
    assert set(evaluation[0]) <= set(evaluation[1])  # which has the evaluation at the end of its first part, too
    assert child.run(script, *command, folder=tmp_path) == 0
    assert "Nothing is left to train: another iteration would exceed --total-timesteps 6000." in text(tmp_path, "err")
    assert equal(torch.load(part / "model.pt", weights_only=True)["policy"], weights[0])


@each_script
def test_evaluation_changes_nothing_and_the_best_policy_is_kept(script, tmp_path):
    weights = []
    for interval in (0, 200):
        folder = tmp_path / str(interval)
        folder.mkdir()
        assert child.run(script, *RUN[script], "--eval-interval", interval, folder=folder) == 0
        [run_dir] = (folder / "runs").iterdir()
        weights.append(torch.load(run_dir / "model.pt", weights_only=True)["policy"])
    assert equal(*weights)
    evaluations = contents(run_dir)[1]["eval/episodic_return"]
    iterations = [step for step, _ in contents(run_dir)[1]["charts/episodic_return"]]
    due = [next(step for step in [0, *iterations] if step >= time) for time in range(0, iterations[-1], 200)]
    assert [step for step, _ in evaluations] == sorted({*due, iterations[-1]}) and len(evaluations) > 3
    step, best = max(evaluations, key=lambda point: point[1])
    saved = torch.load(run_dir / "best.pt", weights_only=True)["run"]
    assert saved["best"] == pytest.approx(best) and saved["step"] == step  # the first of equals
    assert f"Best evaluation: {best:.2f}" in text(folder, "out")
    assert child.run(script, "--evaluate", run_dir / "best.pt", "--eval-episodes", 2, folder=folder) == 0
    assert f"return {best:.2f} ±" in text(folder, "out")


@each_script
def test_an_evaluation_that_failed_is_made_when_the_run_goes_on(script, cli, unbroken, monkeypatch):
    module = importlib.import_module(script)
    evaluate, count = module.evaluate, itertools.count(1)

    def fails_once(*args, **kwargs):
        if next(count) == 2:
            raise module.UserError("The environment failed.")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(module, "evaluate", fails_once)
    assert cli(script, *RUN[script])[0] == 2
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    assert cli(script, "--resume", checkpoint)[0] == 0
    assert equal(contents(checkpoint.parent), unbroken(script))


@each_script
def test_runs_that_start_at_once_have_folders_of_their_own(script, tmp_path):
    processes = [child.start(script, *RUN[script], "--total-timesteps", 3000, folder=tmp_path) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 3 and all(len(list(run.iterdir())) == 4 for run in runs)  # three models, one file of logs
    assert all(equal(contents(run), contents(runs[0])) for run in runs)


@pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])
def test_threads_of_the_environment_change_nothing(script, unbroken, tmp_path):
    """As processes of their own: OMP_NUM_THREADS is read when torch is loaded."""
    for threads in ("1", "8"):
        command = [sys.executable, child.ROOT / f"{script}.py", *map(str, RUN[script])]
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True)
    for run_dir in (tmp_path / "runs").iterdir():
        assert equal(contents(run_dir), unbroken(script))


class TestDisk:
    @each_script
    def test_full_while_a_checkpoint_is_written(self, script, tmp_path):
        """No file may exceed 20 kB: logs and model.pt fit, checkpoint.pt does not. The old ones stay as they are."""
        assert child.run(script, "--hidden-size", 32, *RUN[script], "--total-timesteps", 3000, folder=tmp_path) == 0
        [run_dir] = (tmp_path / "runs").iterdir()
        before = (run_dir / "checkpoint.pt").read_bytes()
        command = ["--resume", run_dir / "checkpoint.pt", "--total-timesteps", 6000]
        assert child.run(script, *command, folder=tmp_path, file_limit=20_000) == 2
        message = f"{script}.py: Cannot write {run_dir}/checkpoint.pt: File too large."
        assert text(tmp_path, "err").splitlines()[-1] == message  # after the lines of progress
        assert (run_dir / "checkpoint.pt").read_bytes() == before and not list(run_dir.glob("*.part"))
        assert child.run(script, *command, folder=tmp_path) == 0

    @each_script
    def test_full_from_the_start(self, script, tmp_path):
        assert child.run(script, *RUN[script], folder=tmp_path, file_limit=300) == 2
        assert re.fullmatch(rf"{script}.py: Cannot write .*: File too large\.\n", text(tmp_path, "err"))


class TestFiles:
    """A checkpoint that cannot be used is one sentence and status 2, and no file of its folder changes."""

    @each_script
    def test_checkpoints_of_no_use(self, cli, script, finished):
        run_dir, other = finished(script), "ppo" if script != "ppo" else "grpo_rtg"
        path, whole = run_dir / "checkpoint.pt", (run_dir / "checkpoint.pt").read_bytes()
        Path("folder.pt").mkdir()
        saved = torch.load(path, weights_only=True)
        cases = {
            "truncated": (whole[:-2000], "Cannot read"),
            "empty": (b"", "Cannot read"),
            "text": (b"not a checkpoint", "Cannot read"),
        }
        changes = {
            "unknown option": {"args": saved["args"] | {"colour": 1}},
            "option out of range": {"args": saved["args"] | {"gamma": 2.0}},
            "option of another type": {"args": saved["args"] | {"gamma": "high"}},
            "another place in the run": {"run": {"somewhere": 1}},
            "another network": {"args": saved["args"] | {"hidden_size": 8}},
            "another optimizer": {"optimizer": {}},
        }
        for name, (content, message) in cases.items():
            Path("bad.pt").write_bytes(content)
            self.refused(cli, script, name, ["--resume", "bad.pt"], message)
        for name, change in changes.items():
            torch.save(saved | change, "bad.pt")
            self.refused(cli, script, name, ["--resume", "bad.pt"], r"Cannot (read|use) bad\.pt|--gamma must be")
        before = {file.name: file.read_bytes() for file in run_dir.iterdir()}
        for args, message in (
            (["--resume", "nowhere.pt"], "Cannot read nowhere.pt"),
            (["--resume", "folder.pt"], "Cannot read folder.pt"),
            (["--resume", run_dir / "model.pt"], "Cannot use .*: its (optimizer|reference) is missing"),
            (["--resume", path, "--env-id", "Acrobot-v1"], r"was trained on (4 )?CartPole-v1"),
            (["--resume", path, "--total-timesteps", 1024], r"has taken \d+ steps: --total-timesteps 1024 is less"),
            (["--resume", path, "--hidden-size", 16], "Cannot use .*: its policy does not fit the options"),
        ):
            self.refused(cli, script, message, args, message)
        self.refused(cli, other, "other script", ["--resume", path], rf"was made by {script}\.py: use it with that")
        assert {file.name: file.read_bytes() for file in run_dir.iterdir()} == before and not Path("runs").exists()

    def refused(self, cli, script, name, args, message):
        status, _, err = cli(script, *args)
        assert status == 2 and err.count("\n") == 1 and re.search(message, err), (name, err)

    @each_script
    def test_a_strangers_file_runs_no_code(self, cli, script, finished, monkeypatch):
        class Attack:
            def __reduce__(self):
                return Path.touch, (Path("attacked"),)

        torch.save({"script": script, "args": {}, "policy": Attack()}, "attack.pt")
        for option in ("--evaluate", "--resume"):
            self.refused(cli, script, option, [option, "attack.pt"], r"Cannot read attack.pt \(UnpicklingError\)")
        assert not Path("attacked").exists()
        # an environment of the file's choice would import a module of the file's choice
        module = f"strange_{script}"
        Path(f"{module}.py").write_text("from pathlib import Path\nPath('attacked').touch()\n")
        monkeypatch.syspath_prepend(".")
        saved = torch.load(finished(script) / "checkpoint.pt", weights_only=True)
        saved["args"]["env_id"] = f"{module}:CartPole-v1"
        torch.save(saved, "attack.pt")
        for option in ("--evaluate", "--resume"):
            message = rf"attack.pt would import a module: if you trust it, add --env-id {module}:CartPole-v1$"
            self.refused(cli, script, option, [option, "attack.pt"], message)
        assert not Path("attacked").exists()
        args = ["--evaluate", "attack.pt", "--env-id", f"{module}:CartPole-v1", "--eval-episodes", 1]
        assert cli(script, *args)[0] == 0 and Path("attacked").exists()


MEASURE = """
import importlib, sys
module, update, sizes = importlib.import_module(sys.argv[1]), None, []
def measured(*args):
    sizes.append(int(open("/proc/self/statm").read().split()[1]))
    if len(sizes) == 2001:
        print(sizes[200] * 4096, sizes[2000] * 4096, flush=True)
        sys.exit(0)
    return update(*args)
update, module.update = module.update, measured
options = {"num_envs": 2, "num_steps": 8} if sys.argv[1] == "ppo" else {"num_groups": 1, "group_size": 4}
module.train(module.Args(env_id="tests.envs:ChooseLength-v0", total_timesteps=10**6, update_epochs=1,
                         num_minibatches=1, eval_interval=1000, eval_episodes=2, **options))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@each_script
def test_memory_does_not_grow(script, tmp_path):
    """Resident memory after 2,000 iterations is within 5% of that after 200."""
    command = [sys.executable, "-c", MEASURE, script]
    environ = {**os.environ, "PYTHONPATH": str(child.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    early, late = map(int, done.stdout.split("\n")[-2].split())
    print(f"{script}: {early / 2**20:.1f} MiB after 200 iterations, {late / 2**20:.1f} MiB after 2,000")
    assert late <= 1.05 * early
