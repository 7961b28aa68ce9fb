"""Run a script's main() in a process forked from one that has torch loaded.

A start takes 0.1 s instead of 2.
"""

import importlib
import multiprocessing
import os
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ["grpo_outcome", "grpo_process", "grpo_rtg", "ppo"]
# A run of a few iterations, a fifth of a second long.
TINY = ["--total-timesteps", 400, "--max-episode-steps", 20, "--hidden-size", 8]
TINY += ["--update-epochs", 2, "--num-minibatches", 2, "--eval-episodes", 2]
GROUPS = ["--num-groups", 1, "--group-size", 4]
TINY = {script: [*TINY, *GROUPS] for script in SCRIPTS[:3]} | {
    "ppo": [*TINY, "--num-envs", 4, "--num-steps", 16]
}


def _main(script: str, argv: list[str], folder: str, file_limit: int | None) -> None:
    os.chdir(folder)
    for descriptor, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = [f"{script}.py", *argv]
    importlib.import_module(script).main()


def start(script: str, *argv, folder, file_limit: int | None = None) -> multiprocessing.Process:
    """A running process; what it prints goes to out.txt and err.txt in folder.

    No file it writes exceeds file_limit.
    """
    os.environ["PYTHONPATH"] = str(ROOT)  # for the server, which else cannot preload from here
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.child", *SCRIPTS])
    for name in ("out.txt", "err.txt"):
        Path(folder, name).write_text("")
    argv = [str(x) for x in argv]
    process = context.Process(target=_main, args=(script, argv, str(folder), file_limit))
    process.start()
    return process


def run(script: str, *argv, folder, **kwargs) -> int:
    """Exit status of a whole run."""
    process = start(script, *argv, folder=folder, **kwargs)
    process.join()
    return process.exitcode
