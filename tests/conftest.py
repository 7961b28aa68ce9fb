import importlib
import re
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that plain `pytest` finds the scripts


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    tqdm._instances.clear()  # bars of runs that an exception ended


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a script's main(): exit status, standard output, standard error."""
    from tests.child import main

    def call(script, *args, **options):
        capsys.readouterr()
        monkeypatch.setattr(sys, "path", [*filter(None, sys.path)])
        status = 0
        try:
            main(importlib.import_module(script), *args, **options)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def refused(cli):
    """Expect status 2, one sentence with this message."""

    def check(message, script, **options):
        status, _, err = cli(script, **options)
        err = re.sub(r"[^\r\n]*steps/s\]|\r *", "", err).strip()  # without bars
        assert status == 2 and re.match(rf"{script}\.py: .*{message}", err, re.S), err
        assert "\n" not in err or "Cannot use" in err, err  # torch's own words are many

    return check
