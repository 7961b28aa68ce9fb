"""The studies that run.py runs: which settings, on which environments, with which seeds.

A study is a function that gives the fields of run.py's Job for each of its runs, in the order in
which to run them.
"""

from functools import partial

STEPS = {
    "CartPole-v1": 100_000,
    "Acrobot-v1": 200_000,
    "MountainCarContinuous-v0": 300_000,
    "Pendulum-v1": 300_000,
    "FrozenLake-v1": 100_000,
    "LunarLander-v3": 500_000,
    "Hopper-v5": 250_000,
    "HalfCheetah-v5": 250_000,
}
MUJOCO = ("Hopper-v5", "HalfCheetah-v5")
TUNING_STEPS = STEPS | {
    "MountainCarContinuous-v0": 150_000,
    "Pendulum-v1": 200_000,
    "LunarLander-v3": 300_000,
}
TUNING_SEEDS = (101, 102)  # no result uses them
SEEDS = range(1, 11)  # of the results


def shape(groups: int, members: int, epochs: int, size: int, rate: str) -> str:
    """An iteration of GRPO: groups x members, passes over it, steps a minibatch, step size."""
    groups = f"--num-groups {groups} --group-size {members}"
    return f"{groups} --update-epochs {epochs} --minibatch-size {size} --learning-rate {rate}"


SHAPES = {
    "4x8, 8 passes of 256, 3e-3": shape(4, 8, 8, 256, "3e-3"),
    "4x4, 8 passes of 256, 3e-3": shape(4, 4, 8, 256, "3e-3"),
    "4x8, 8 passes of 1024, 5e-3": shape(4, 8, 8, 1024, "5e-3"),
    "2x16, 4 passes of 256, 1e-3": shape(2, 16, 4, 256, "1e-3"),
    "4x4, 10 passes of 128, 1e-3": shape(4, 4, 10, 128, "1e-3"),  # the update of ppo.py
}
LONG_SHAPES = {  # MuJoCo's episodes have up to 1,000 steps
    "1x8, 8 passes of 256, 1e-3": shape(1, 8, 8, 256, "1e-3") + " --norm-obs",
    "1x4, 8 passes of 256, 1e-3": shape(1, 4, 8, 256, "1e-3") + " --norm-obs",
    "1x8, 8 passes of 64, 3e-4": shape(1, 8, 8, 64, "3e-4") + " --norm-obs",
    "1x4, 8 passes of 64, 3e-4": shape(1, 4, 8, 64, "3e-4") + " --norm-obs",
    "1x4, 8 passes of 256, 1e-3, log std -2": shape(1, 4, 8, 256, "1e-3")
    + " --norm-obs --log-std-init -2",
}
DISCOUNT = {"MountainCarContinuous-v0": " --gamma 0.999", "Pendulum-v1": " --gamma 0.95"}
LAMBDA = {"LunarLander-v3": " --gae-lambda 0.98"}  # of regression and critic; 0.95 elsewhere

# The ladder has one shape for each environment: of SHAPES the one with the best mean of greedy and
# sampled returns on the tuning seeds, timestep and regression together.
LADDER_SHAPE = dict.fromkeys(STEPS, "4x8, 8 passes of 1024, 5e-3")
LADDER_SHAPE |= {
    "MountainCarContinuous-v0": "4x4, 8 passes of 256, 3e-3",
    "FrozenLake-v1": "2x16, 4 passes of 256, 1e-3",
    "LunarLander-v3": "4x4, 8 passes of 256, 3e-3",
    "Pendulum-v1": "4x4, 10 passes of 128, 1e-3",
    "Hopper-v5": "1x4, 8 passes of 256, 1e-3",
    "HalfCheetah-v5": "1x4, 8 passes of 256, 1e-3, log std -2",
}
RUNGS = {  # each of the first six adds one thing to the one before it
    "outcome": "grpo_outcome.py",
    "group": "grpo_rtg.py --baseline group",
    "timestep": "grpo_rtg.py --baseline timestep",
    "state": "grpo_rtg.py --decay 0 --gae-lambda 1",
    "λ": "grpo_rtg.py --decay 0",
    "memory": "grpo_rtg.py",
    "critic network": "docs/examples/critic.py",
    "PPO": "ppo.py",
}
GPG = "docs/examples/gpg.py"
BESIDE = {"process": "grpo_process.py", "GPG": GPG}  # in the ladder's tables, but no rungs
BIN_WIDTH = dict.fromkeys(STEPS, "1")  # of GPG: the best by widths; on FrozenLake bins are states
BIN_WIDTH |= {"MountainCarContinuous-v0": "0.3", "Pendulum-v1": "0.3"}
BIN_WIDTH |= {"Hopper-v5": "3", "HalfCheetah-v5": "10"}


def ppo(envs: int, steps: int, epochs: int, size: int, rate: str, gae_lambda: float) -> str:
    """An iteration of PPO: environments x steps, passes over it, steps a minibatch, step size."""
    steps = f"--num-envs {envs} --num-steps {steps} --update-epochs {epochs}"
    return f"{steps} --minibatch-size {size} --learning-rate {rate} --gae-lambda {gae_lambda}"


PPO = {  # the best of six to nine settings on tuning seeds, most at commit 681f0c0
    "CartPole-v1": ppo(16, 64, 4, 256, "4e-3", 0.95),
    "Acrobot-v1": ppo(16, 64, 4, 256, "4e-3", 0.9),
    "MountainCarContinuous-v0": ppo(8, 256, 10, 128, "1e-3", 0.9),
    "Pendulum-v1": ppo(8, 256, 10, 128, "1e-3", 0.9),
    "FrozenLake-v1": ppo(8, 256, 10, 128, "1e-3", 0.9),
    "LunarLander-v3": ppo(16, 256, 10, 128, "1e-3", 0.98),  # by the study fair
    "Hopper-v5": ppo(1, 2048, 10, 64, "1e-3", 0.95) + " --norm-obs",
    "HalfCheetah-v5": ppo(1, 2048, 10, 64, "1e-3", 0.95) + " --norm-obs --log-std-init -2",
}


def command(env: str, script: str, flags: str, seed: int, steps: int | None = None) -> str:
    """What runs a script with its options."""
    script, *own = script.split()
    words = [script, "--env-id", env, "--total-timesteps", str(steps or STEPS[env])]
    return " ".join([*words, *own, *flags.split(), "--seed", str(seed)])


def rung_flags(env: str, rung: str, shape_name: str) -> str:
    """A rung's options with a shape: the discount for all, λ for those that have it."""
    if rung == "PPO":
        return PPO[env] + DISCOUNT.get(env, "")
    discount = DISCOUNT.get(env, " --gamma 0.99")
    if rung == "outcome":
        discount = " --gamma 1"  # as in the paper; with the others' it ends lower (study outcome)
    flags = (SHAPES | LONG_SHAPES)[shape_name] + discount
    if rung in ("λ", "memory", "critic network"):
        flags += LAMBDA.get(env, " --gae-lambda 0.95")
    if rung == "GPG":
        flags += f" --bin-width {BIN_WIDTH[env]}"
    return flags


def tried(changes):
    """A study's runs on tuning seeds: of each name, script and flags that changes(env) gives."""
    for seed in TUNING_SEEDS:
        for env, steps in TUNING_STEPS.items():
            for name, script, flags in changes(env):
                yield env, name, seed, command(env, script, flags, seed, steps)


def tuning(env: str):
    """The shapes of timestep and regression."""
    for name in LONG_SHAPES if env in MUJOCO else SHAPES:
        for rung in ("timestep", "memory"):
            yield f"{rung}: {name}", RUNGS[rung], rung_flags(env, rung, name)


def outcome(env: str):
    """Which discount, mean and shape suit outcome supervision?"""
    if env in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1"):
        own = LADDER_SHAPE[env]
        for name in SHAPES:  # group has the others' discount
            if name != own:
                yield f"γ < 1: {name}", RUNGS["outcome"], rung_flags(env, "group", name)
        for discount, rung in (("γ < 1", "group"), ("γ = 1", "outcome")):
            flags = rung_flags(env, rung, own)
            average = f"{flags} --loss-agg trajectory"
            yield f"{discount}: {own}", RUNGS["outcome"], flags
            yield f"{discount}, Eq. 3's mean: {own}", RUNGS["outcome"], average


def singly(env: str):
    """The shapes of group, process and GPG, which had no say in the ladder's."""
    for rung in ("GPG",) if env in MUJOCO else ("group", "process", "GPG"):
        for name in LONG_SHAPES if env in MUJOCO else SHAPES:
            yield f"{rung}: {name}", (RUNGS | BESIDE)[rung], rung_flags(env, rung, name)


def widths(env: str):
    """How wide are GPG's bins? With the ladder's shapes."""
    for width in ("0.1", "0.3", "1", "3", "10"):
        flags = rung_flags(env, "state", LADDER_SHAPE[env])
        yield f"width {width}", f"{GPG} --bin-width {width}", flags


OWN_SHAPE = {  # by singly, where another shape than the ladder's was better
    "group": dict.fromkeys(
        ("CartPole-v1", "Acrobot-v1", "LunarLander-v3"), "4x4, 10 passes of 128, 1e-3"
    )
    | dict.fromkeys(("MountainCarContinuous-v0", "Pendulum-v1"), "4x8, 8 passes of 256, 3e-3"),
    "process": {
        "Acrobot-v1": "4x4, 10 passes of 128, 1e-3",
        "Pendulum-v1": "4x8, 8 passes of 1024, 5e-3",
        "FrozenLake-v1": "4x8, 8 passes of 256, 3e-3",
        "LunarLander-v3": "4x4, 10 passes of 128, 1e-3",
    },
    "GPG": dict.fromkeys(("Pendulum-v1", "LunarLander-v3"), "4x8, 8 passes of 1024, 5e-3")
    | dict.fromkeys(("Acrobot-v1", "FrozenLake-v1"), "4x8, 8 passes of 256, 3e-3")
    | dict.fromkeys(("CartPole-v1", "MountainCarContinuous-v0"), "4x4, 10 passes of 128, 1e-3"),
}


def own():
    """The ladder's group, process and GPG with shapes of their own."""
    for seed in SEEDS:
        for rung, shapes in OWN_SHAPE.items():
            for env, name in shapes.items():
                line = command(env, (RUNGS | BESIDE)[rung], rung_flags(env, rung, name), seed)
                yield env, rung, seed, line


def ladder():
    """From outcome to PPO; the seeds take turns, so that what has been run can be compared."""
    for seed in SEEDS:
        for env in STEPS:
            for rung, script in (RUNGS | BESIDE).items():
                flags = rung_flags(env, rung, LADDER_SHAPE[env])
                yield env, rung, seed, command(env, script, flags, seed)


OPTIONS = ["--no-seed-groups", "--gamma 1", "--gamma 0.9", "--no-norm-std", "--loss-agg trajectory"]
OPTIONS += ["--kl-coef 0.04", "--kl-coef 0.04 --ref-update-interval 0"]
OPTIONS += ["--ent-coef 0.01", "--norm-obs"]
EPISODES = {"CartPole-v1": 32, "Acrobot-v1": 32, "FrozenLake-v1": 32, "LunarLander-v3": 16}


def ablations():
    """The ladder's timestep with options changed that all variants share; its outcome with one."""
    for seed in SEEDS[:5]:
        for env, episodes in EPISODES.items():  # of an iteration, in the ladder
            changes = [("timestep", options, options) for options in OPTIONS]
            pairs = f"--num-groups {episodes // 2} --group-size 2"
            changes.append(("timestep", "groups of two", pairs))
            changes.append(("timestep", "one group", f"--num-groups 1 --group-size {episodes}"))
            changes.append(("outcome", "outcome, --no-seed-groups", "--no-seed-groups"))
            for rung, name, options in changes:
                flags = f"{rung_flags(env, rung, LADDER_SHAPE[env])} {options}"
                yield env, name, seed, command(env, RUNGS[rung], flags, seed)


LOG_STD = {"Hopper-v5": "--log-std-init 0", "HalfCheetah-v5": "--log-std-init -2"}  # the ladder's


def mujoco():
    """The ladder on MuJoCo with the other first log std, or observations or rewards otherwise."""
    for seed in SEEDS[:5]:
        for env, other in zip(MUJOCO, reversed(LOG_STD.values())):
            changes = [(rung, other) for rung in ("timestep", "memory", "PPO")]
            changes += [(rung, "--no-norm-obs") for rung in ("timestep", "memory")]
            for rung, options in changes:
                flags = f"{rung_flags(env, rung, LADDER_SHAPE[env])} {options}"
                yield env, f"{rung} {options}", seed, command(env, RUNGS[rung], flags, seed)
            flags = rung_flags(env, "PPO", LADDER_SHAPE[env])
            yield env, "PPO normalized rewards", seed, command(env, NORMALIZED, flags, seed)


def million():
    """Rungs of the ladder on MuJoCo with four times the steps."""
    for seed in SEEDS[:5]:
        for env in MUJOCO:
            for rung in ("timestep", "memory", "PPO"):
                flags = rung_flags(env, rung, LADDER_SHAPE[env])
                yield env, rung, seed, command(env, RUNGS[rung], flags, seed, 1_000_000)


UNSEEN = {"Walker2d-v5": 250_000, "InvertedDoublePendulum-v5": 250_000}  # nobody tuned on them


def unseen():
    """Hopper's flags on environments that nobody tuned on."""
    for seed in SEEDS[:5]:
        for env, steps in UNSEEN.items():
            for rung in ("timestep", "memory", "PPO"):
                flags = rung_flags("Hopper-v5", rung, LADDER_SHAPE["Hopper-v5"])
                yield env, rung, seed, command(env, RUNGS[rung], flags, seed, steps)


GRID = "docs.examples.grid_world:GridWorld-v0"
PREFERRED = "docs.examples.preferences:PreferredGridWorld-v0"
PAIRS = "--num-groups 32 --group-size 2 --learning-rate 2e-3 --minibatch-size 256 --ent-coef 0.03"
SCRIPTS = ["grpo_outcome.py", "grpo_process.py", "grpo_rtg.py"]
SCRIPTS += ["grpo_rtg.py --baseline timestep", "grpo_rtg.py --baseline group", "ppo.py"]


def examples():
    """The grid world of docs/environments.md, and its judge."""
    for seed in SEEDS[:5]:
        for script in SCRIPTS:
            yield GRID, script, seed, command(GRID, script, "", seed, 60_000)
        line = command(PREFERRED, "grpo_outcome.py", PAIRS, seed, 200_000)
        yield PREFERRED, "pairs", seed, line


def regression(members: int, epochs: int, size: int, rate: str, gae_lambda: str) -> tuple:
    """Candidates for the defaults of grpo_rtg.py: a name, and its options."""
    name = f"4x{members}, {epochs} passes of {size}, {rate}, λ {gae_lambda}"
    return name, f"{shape(4, members, epochs, size, rate)} --gae-lambda {gae_lambda}"


DEFAULTS = regression(4, 8, 256, "3e-3", "0.98")
CHOICES = [DEFAULTS]
CHOICES += [regression(4, 10, 128, "1e-3", value) for value in ("0.98", "0.97", "0.95")]
CHOICE_STEPS = {"FrozenLake-v1": 100_000, "MountainCarContinuous-v0": 300_000}
CHOICE_STEPS |= {"LunarLander-v3": 500_000}


def choices():
    """On tuning seeds: the defaults of grpo_rtg.py; longer on CartPole."""
    for env, steps in CHOICE_STEPS.items():
        for seed in range(101, 104 if env == "LunarLander-v3" else 106):
            for name, flags in CHOICES:
                yield env, name, seed, command(env, "grpo_rtg.py", flags, seed, steps)
    for seed in range(104, 109):  # on others, for the first two above had a say
        for name, flags in CHOICES[:2]:
            line = command("LunarLander-v3", "grpo_rtg.py", flags, seed, 1_000_000)
            yield "LunarLander-v3", f"{name}, 1,000,000 steps", seed, line
    name, flags = DEFAULTS
    for seed in (101, 102, 103):
        line = command("CartPole-v1", "grpo_rtg.py", flags, seed, 500_000)
        yield "CartPole-v1", f"{name}, 500,000 steps", seed, line
    for seed in range(101, 106):
        yield "CartPole-v1", name, seed, command("CartPole-v1", "grpo_rtg.py", flags, seed)


ZOO = ppo(16, 1024, 4, 64, "3e-4", 0.98) + " --gamma 0.999 --ent-coef 0.01 --no-anneal-lr"
NORMALIZED = "docs/benchmark/normalized_ppo.py"  # ppo.py with normalized rewards


def fair():
    """Settings of PPO where one of commit 681f0c0 may not be the best, on tuning seeds."""
    for seed in TUNING_SEEDS:
        for env in (*MUJOCO, "MountainCarContinuous-v0"):
            flags = PPO[env] + DISCOUNT.get(env, "")
            steps = TUNING_STEPS[env] if env in MUJOCO else STEPS[env]
            yield env, "ppo.py", seed, command(env, "ppo.py", flags, seed, steps)
            yield env, "normalized rewards", seed, command(env, NORMALIZED, flags, seed, steps)
        env = "LunarLander-v3"
        yield env, "ppo.py", seed, command(env, "ppo.py", PPO[env], seed)
        yield env, "RL-Zoo's settings", seed, command(env, "ppo.py", ZOO, seed)


DEFAULT_STEPS = {"CartPole-v1": 200_000, "Acrobot-v1": 500_000, "Pendulum-v1": 500_000}
DEFAULT_STEPS |= {"LunarLander-v3": 1_000_000}


def default_tuning():
    """Two iterations for the defaults of the GRPO scripts, on five tuning seeds."""
    for seed in range(101, 106):
        for env, steps in DEFAULT_STEPS.items():
            for script in ("grpo_outcome.py", "grpo_process.py", "grpo_rtg.py"):
                if (env, script) == ("CartPole-v1", "grpo_process.py"):
                    continue  # all its advantages are 0
                for name in ("4x4, 8 passes of 256, 3e-3", "4x8, 8 passes of 1024, 5e-3"):
                    variant = f"{script} {name}"
                    yield env, variant, seed, command(env, script, SHAPES[name], seed, steps)


def defaults():
    """What the scripts do with nothing but an environment and its steps."""
    for seed in SEEDS:
        for env, steps in DEFAULT_STEPS.items():
            for script in ("grpo_rtg.py", "ppo.py"):
                yield env, script, seed, command(env, script, "", seed, steps)


STUDIES = {"choices": choices, "ladder": ladder, "fair": fair, "unseen": unseen, "own": own}
STUDIES |= {"examples": examples, "ablations": ablations, "mujoco": mujoco, "million": million}
STUDIES |= {"default_tuning": default_tuning, "defaults": defaults}
for study in (tuning, outcome, singly, widths):
    STUDIES[study.__name__] = partial(tried, study)
