"""A script whose Gaussian policy begins with another standard deviation, for the ablations.

    python docs/benchmark/first_std.py --script ppo.py --log-std -2 --env-id HalfCheetah-v5

Every other option is one of the script. With --log-std 0 it is the script as it is.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def begin_with(module, log_std: float) -> None:
    """Let every new policy of a script begin with this log of the standard deviation."""
    init = module.Policy.__init__

    def init_with_log_std(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if not self.discrete:
            self.log_std.data.fill_(log_std)

    module.Policy.__init__ = init_with_log_std


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    scripts = ["grpo_outcome.py", "grpo_process.py", "grpo_rtg.py", "ppo.py"]
    parser.add_argument("--script", choices=scripts, required=True)
    parser.add_argument("--log-std", type=float, required=True)
    choices, sys.argv[1:] = parser.parse_known_args()
    module = importlib.import_module(Path(choices.script).stem)
    begin_with(module, choices.log_std)
    module.main()


if __name__ == "__main__":
    main()
