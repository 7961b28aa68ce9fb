import importlib
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that plain `pytest` finds the scripts


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a script's main() with these arguments; exit status, standard output, standard error."""

    def call(script, *args):
        tqdm._instances.clear()  # bars of runs that an exception ended: a process has one bar
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        try:
            importlib.import_module(script).main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call
