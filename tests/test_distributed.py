"""torchrun: two processes average their gradients and stay alike, and a lost one ends the run."""

import contextlib
import importlib
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import tyro
from torch import nn

from tests import child
from tests.child import both_kinds, contents, curves, equal, only_run, read

SMALL = ["--total-timesteps", "900", "--max-episode-steps", "60", "--eval-episodes", "2"]
SMALL += ["--update-epochs", "2", "--minibatch-size", "32", "--norm-obs", "--hidden-size", "8"]
SMALL = {"grpo_rtg": [*SMALL, "--group-size", "3"], "ppo": [*SMALL, "--num-envs", "4"]}
SMALL["ppo"] += ["--num-steps", "64"]


def two_processes() -> list[dict]:
    """What torchrun would say to them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [both | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def _train(script: str, argv: list[str], environ: dict, folder: str) -> None:
    """One of two processes; what its updates got and gave goes to rank.pt."""
    os.chdir(folder)
    os.environ |= environ
    module = importlib.reload(importlib.import_module(script))
    loss_name = "ppo_loss" if script == "ppo" else "grpo_loss"
    update, loss, run_init = module.update, getattr(module, loss_name), module.Run.__init__
    seen = {"sizes": [], "steps": 0}

    def watched_run(run, args, parts):
        seen["parts"] = parts
        stats = module.RunningMeanVar(1)
        stats.update(torch.full((5, 1), 10.0 * module.RANK))
        seen["stats"] = [stats.mean.item(), stats.var.item(), stats.count.item()]
        run_init(run, args, parts)

    def watched_update(policy, optimizer, batch, *rest):
        seen["steps"] += len(batch["obs"])
        seen["obs"] = batch["obs"]
        seen["metrics"] = update(policy, optimizer, batch, *rest)
        seen.setdefault("gradient", [x.grad.clone() for x in policy.parameters()])
        return seen["metrics"]

    def watched_loss(policy, minibatch, *coefs):
        """Keeps the gradient that this process alone has, of the first update's last minibatch."""
        value, metrics = loss(policy, minibatch, *coefs)
        if "gradient" not in seen:
            seen["own"] = torch.autograd.grad(value, list(policy.parameters()), retain_graph=True)
        seen["sizes"].append(len(minibatch["obs"]))
        return value, metrics

    module.update, module.Run.__init__ = watched_update, watched_run
    setattr(module, loss_name, watched_loss)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        seen["summary"] = module.train(tyro.cli(module.Args, args=argv))
    seen["parts"] = {name: part.state_dict() for name, part in seen["parts"].items()}
    torch.save(seen | {"dirs": os.listdir("runs"), "out": out.getvalue()}, f"{environ['RANK']}.pt")


def end(processes) -> list[int]:
    """Their exit statuses, within a minute."""
    for process in processes:
        process.join(60)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


@both_kinds
def test_two_processes_average_their_gradients_and_stay_alike(script):
    argv = [*SMALL[script], "--max-grad-norm", "1e-4", "--target-kl", "1e-3"]
    Process = child.context().Process
    both = [Process(target=_train, args=(script, argv, x, os.getcwd())) for x in two_processes()]
    for process in both:
        process.start()
    assert end(both) == [0, 0]
    one, other = (torch.load(f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert not torch.equal(one["obs"], other["obs"])  # each plays episodes of its own
    means = [(x + y) / 2 for x, y in zip(one["own"], other["own"])]
    scale = 1e-4 / nn.utils.get_total_norm(means)
    for mean, given in zip(means, one["gradient"]):  # clipped once averaged
        torch.testing.assert_close(given, mean * scale, rtol=1e-3, atol=1e-9)
    assert equal(one["parts"], other["parts"])  # weights, statistics, the regression
    for name in ("losses/approx_kl", "losses/grad_norm"):
        assert one["metrics"][name] == other["metrics"][name]
    assert one["stats"] == other["stats"] == [5, 25, 5]  # of zeros in one and tens in the other
    assert len(one["sizes"]) == len(other["sizes"]) > 1
    size = np.mean(one["sizes"]) + np.mean(other["sizes"])
    assert 24 < size < 48  # about 32 together; all take as many as the one with the fewest steps
    steps = one["steps"] + other["steps"]
    assert one["summary"]["step"] == steps <= 900
    assert one["parts"]["policy"]["obs_stats.count"] == pytest.approx(steps / 2)  # the mean
    assert other["summary"] == {} and len(one["dirs"]) == 1
    assert one["out"].count("Trained") == 1 and "Trained" not in other["out"]
    assert max(curves(one["summary"]["run_dir"])["losses/approx_kl"]) == steps


MANY = [pytest.param(script, 4, marks=pytest.mark.slow) for script in SMALL]


@pytest.mark.parametrize(("script", "kills"), [("grpo_rtg", 1), *MANY])
def test_killed_processes_go_on_as_if_there_had_been_no_stop(script, kills, tmp_path):
    """Both are killed at random moments, and resumed: the same to the bit (ppo.py: to the end)."""

    def start(*command):
        environs = two_processes()
        return [child.start(script, *command, folder=tmp_path, environ=x) for x in environs]

    moments = random.Random(0)
    command = [*SMALL[script], "--checkpoint-interval", 0]
    assert end(start(*command)) == [0, 0]
    whole = contents(only_run(tmp_path))
    (tmp_path / "runs").rename(tmp_path / "whole")
    for _ in range(kills):
        one, other = start(*command)
        child.wait_for_iteration(max(child.iteration_in(tmp_path) + 1, 1), one, tmp_path)
        one.join(moments.uniform(0, 0.1))
        one.kill()
        other.kill()
        end([one, other])
        command = ["--resume", only_run(tmp_path) / "checkpoint.pt"]
    assert end(start(*command)) == [0, 0], (tmp_path / "err0.txt").read_text()
    resumed = contents(only_run(tmp_path))
    if script == "ppo":
        assert resumed["checkpoint"]["progress"]["step"] == 768
    else:
        assert equal(resumed, whole)


@pytest.mark.slow
def test_under_torchrun_a_lost_process_ends_the_run_and_the_printed_command_resumes_it():
    def torchrun(*argv) -> subprocess.Popen:
        launch = [sys.executable, "-m", "torch.distributed.run", *map(str, argv)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(launch, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)

    flags = [*SMALL["grpo_rtg"], "--checkpoint-interval", 0, "--total-timesteps", 10**9]
    process = torchrun("--nproc-per-node=2", child.ROOT / "grpo_rtg.py", *flags)
    child.wait_for(lambda: child.iteration_in(".") > 1)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    [command] = re.findall("^If it stops: torchrun (.*)$", out, re.M)
    step = read(only_run() / "checkpoint.pt")["progress"]["step"]
    process = torchrun(*command.split(), "--total-timesteps", step + 900)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("Trained") == out.count("Greedy evaluation") == 1
    assert step < read(only_run() / "checkpoint.pt")["progress"]["step"] <= step + 900


def test_groups_and_minibatches_that_cannot_be_split_are_refused(refused, monkeypatch):
    for script, option in (("grpo_rtg", "--num-groups"), ("ppo", "--num-envs")):
        monkeypatch.setattr(importlib.import_module(script), "WORLD_SIZE", 2)
        refused(f"{option} must be a multiple of the 2 processes", script, option, 3)
        refused("--minibatch-size must be at least 2", script, "--minibatch-size", 1)
