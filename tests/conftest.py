import importlib
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that plain `pytest` finds the scripts


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a script's main() with these arguments; exit status, standard output, standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # which main sets

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        try:
            importlib.import_module(script).main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
