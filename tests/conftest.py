import importlib
import re
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that plain `pytest` finds the scripts


@pytest.fixture(autouse=True)
def writers(tmp_path, monkeypatch):
    """Each test has a folder of its own; the logs of runs that an exception ended are closed."""
    monkeypatch.chdir(tmp_path)
    opened = []
    init = SummaryWriter.__init__

    def recorded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(SummaryWriter, "__init__", recorded)
    yield opened
    for writer in opened:
        writer.close()


@pytest.fixture
def cli(monkeypatch, capsys, writers):
    """Run a script's main() with these arguments; exit status, standard output, standard error."""

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        try:
            importlib.import_module(script).main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        finally:
            tqdm._instances.clear()  # bars of runs that an exception ended
            for writer in writers:
                writer.close()
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def refused(cli):
    """Expect status 2, one sentence with this message, and no model."""

    def check(message, script, *args):
        status, _, err = cli(script, *args)
        [sentence] = [x for x in re.split("[\r\n]+", err) if x.strip() and "steps/s" not in x]
        assert status == 2 and re.match(rf"{script}\.py: .*{message}", sentence), err
        assert not list(Path("runs").glob("*/model.pt"))

    return check
