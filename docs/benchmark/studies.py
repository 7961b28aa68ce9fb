"""The studies that run.py runs: which settings, on which environments, with which seeds.

A study is a function that gives each of its settings: seeds, environment, variant and command.
"""

import csv
import json
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from statistics import fmean

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
RESULTS = Path(__file__).parent / "results"
TUNING_SEEDS = range(101, 121)  # no result uses them
SEEDS = range(1, 11)  # of the results
DEFAULTS_SEEDS = {"grpo_rtg.py": range(31, 41), "ppo.py": SEEDS}  # new with a new default


def command(env: str, steps: int, line: str) -> str:
    """What runs a script with its options, but the seed."""
    script, *options = line.split()
    return " ".join([script, f"--env-id {env} --total-timesteps {steps}", *options])


def shape(groups: int, members: int, epochs: int, size: int, rate: str) -> str:
    """An iteration of GRPO: groups x members, passes over it, steps a minibatch, step size."""
    groups = f"--num-groups {groups} --group-size {members} --update-epochs {epochs}"
    return f"{groups} --minibatch-size {size} --learning-rate {rate}"


def ppo(envs: int, steps: int, epochs: int, size: int, rate: str, gae_lambda: float) -> str:
    """An iteration of PPO: environments x steps, passes over it, steps a minibatch, step size."""
    steps = f"--num-envs {envs} --num-steps {steps} --update-epochs {epochs}"
    return f"{steps} --minibatch-size {size} --learning-rate {rate} --gae-lambda {gae_lambda}"


VARIANTS = {  # columns of the study's table
    "outcome": "grpo_outcome.py",
    "process": "grpo_process.py",
    "group": "grpo_rtg.py --baseline group",
    "timestep": "grpo_rtg.py",
    "regression": "docs/examples/regression.py",
    "critic": "docs/examples/critic.py",
    "bins": "docs/examples/gpg.py",
    "PPO": "ppo.py",
}
# Bins are for few dimensions.
BINS = ("CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", "Pendulum-v1", "FrozenLake-v1")
# The best of five shapes on tuning seeds, and of six to nine settings of PPO: see commit 0a6aeb1.
SHAPE = dict.fromkeys(STEPS, shape(4, 8, 8, 1024, "5e-3"))
SHAPE |= dict.fromkeys(("MountainCarContinuous-v0", "LunarLander-v3"), shape(4, 4, 8, 256, "3e-3"))
SHAPE["FrozenLake-v1"] = shape(2, 16, 4, 256, "1e-3")
SHAPE["Pendulum-v1"] = shape(4, 4, 10, 128, "1e-3")
SHAPE["Hopper-v5"] = shape(1, 4, 8, 256, "1e-3") + " --norm-obs"
SHAPE["HalfCheetah-v5"] = shape(1, 4, 8, 256, "1e-3") + " --norm-obs --log-std-init -2"
DENSE = ("Pendulum-v1", "LunarLander-v3", "Hopper-v5", "HalfCheetah-v5")  # no group ties
SHAPE |= {env: f"{SHAPE[env]} --ent-coef 0" for env in DENSE}
PPO = dict.fromkeys(STEPS, ppo(8, 256, 10, 128, "1e-3", 0.9))
PPO["CartPole-v1"] = ppo(16, 64, 4, 256, "4e-3", 0.95)
PPO["Acrobot-v1"] = ppo(16, 64, 4, 256, "4e-3", 0.9)
PPO["LunarLander-v3"] = ppo(16, 256, 10, 128, "1e-3", 0.98)
PPO["Hopper-v5"] = ppo(1, 2048, 10, 64, "1e-3", 0.95) + " --norm-obs"
PPO["HalfCheetah-v5"] = ppo(1, 2048, 10, 64, "1e-3", 0.95) + " --norm-obs --log-std-init -2"
GAMMAS = dict.fromkeys(STEPS, ("0.99", "0.95", "1"))  # tried on an environment
GAMMAS |= {"MountainCarContinuous-v0": ("0.999", "0.99", "1")}  # its one reward is far away
GAMMAS |= dict.fromkeys(("Pendulum-v1", "HalfCheetah-v5"), ("0.95", "0.9", "0.99"))
LAMBDA = {"LunarLander-v3": "0.98"}  # of regression and critic; 0.95 elsewhere
CELLS = [
    (env, variant) for env in STEPS for variant in VARIANTS if variant != "bins" or env in BINS
]


def base(env: str, variant: str) -> str:
    """A variant's script and options but γ and λ: one iteration for all but PPO."""
    return f"{VARIANTS[variant]} {PPO[env] if variant == 'PPO' else SHAPE[env]}"


def discounts(env: str, variant: str) -> list[str]:
    """What is tried of a variant on an environment: three γ, and λ = 1 where there is a λ."""
    if variant == "outcome":  # it discounts from an episode's start
        return [f"--gamma {x}" for x in ("1", "0.99", "0.999")]
    own = [f"--gamma {x}" for x in GAMMAS[env]]
    if variant in ("regression", "critic"):
        own = [f"{x} --gae-lambda {LAMBDA.get(env, '0.95')}" for x in own]
    if variant in ("regression", "critic", "PPO"):
        own.append(f"--gamma {GAMMAS[env][0]} --gae-lambda 1")
    return own


def discount_tuning():
    """Which γ for each variant and environment? Is λ = 1 better? Close calls have four seeds."""
    for env, variant in CELLS:
        for options in discounts(env, variant):
            line = command(env, STEPS[env], f"{base(env, variant)} {options}")
            yield TUNING_SEEDS[:4], env, f"{variant} {options}", line


def read(study: str) -> dict[tuple[str, str, str], dict]:
    """The rows of a CSV by environment, variant and seed."""
    path = RESULTS / f"{study}.csv"
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {(row["env"], row["variant"], row["seed"]): row for row in csv.DictReader(file)}


@cache
def tried(study: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """How a study's runs ended: greedy and training returns of each environment and variant."""
    returns = defaultdict(list)
    for (env, variant, _), row in read(study).items():
        returns[env, variant].append((float(row["greedy"]), float(row["train_return"])))
    return returns


def best(study: str, env: str, variant: str, options: list[str]) -> str:
    """Of the options with most seeds, those with the highest mean greedy return; then, training."""

    def merit(option: str) -> tuple[float, ...]:
        runs = tried(study)[env, f"{variant} {option}"]
        return len(runs), *(fmean(column) for column in zip(*runs))

    return max(options, key=merit)


def tuned(env: str, variant: str) -> str:
    """A variant's script and options, with the best of its discounts."""
    chosen = best("discount_tuning", env, variant, discounts(env, variant))
    return f"{base(env, variant)} {chosen}"


def ladder():
    """Every variant on every environment, with the best of its discounts."""
    for env, variant in CELLS:
        yield SEEDS, env, variant, command(env, STEPS[env], tuned(env, variant))


def earlier(env: str, variant: str) -> str:
    """A variant's script and options before the discounts were tuned."""
    options = base(env, variant) + (" --gamma 1" if variant == "outcome" else " --gamma 0.99")
    return options + " --gae-lambda 0.95" * (variant == "regression")


THREE = ("timestep", "regression", "PPO")


def few(envs, steps: int, like: str | None = None):
    """Some variants on environments, with their options or those of another one."""
    for env in envs:
        for variant in THREE:
            yield SEEDS[:5], env, variant, command(env, steps, earlier(like or env, variant))


million = partial(few, ("Hopper-v5", "HalfCheetah-v5"), 1_000_000)
unseen = partial(few, ("Walker2d-v5", "InvertedDoublePendulum-v5"), 250_000, "Hopper-v5")


def still():
    """Which policies stand still, without an entropy bonus and with it?"""
    env = "Acrobot-v1"
    for variant in ("outcome", "process", "group"):
        for weight in ("0", "0.001"):
            line = f"{earlier(env, variant)} --ent-coef {weight}"
            yield SEEDS, env, f"{variant} {weight}", command(env, STEPS[env], line)


OPTIONS = ["--no-seed-groups", "--gamma 1", "--gamma 0.9", "--no-norm-std", "--loss-agg trajectory"]
OPTIONS += ["--kl-coef 0.04", "--kl-coef 0.04 --ref-update-interval 1"]
OPTIONS += ["--ent-coef 0", "--ent-coef 0.001", "--ent-coef 0.01", "--update-epochs 1"]
SCALES = {"leave-one-out": "leave-one-out", "a std for each step": "step"}
EPISODES = {"CartPole-v1": 32, "Acrobot-v1": 32, "FrozenLake-v1": 32, "LunarLander-v3": 16}


def ablations():
    """Timestep, one of its options changed; outcome supervision, with shared starts and without."""
    for env, episodes in EPISODES.items():  # of an iteration
        timestep, outcome = earlier(env, "timestep"), earlier(env, "outcome")
        lines = {"timestep": timestep, "outcome": outcome}
        own = f"--ent-coef {0 if env in DENSE else 0.001}"
        lines |= {options: f"{timestep} {options}" for options in OPTIONS if options != own}
        lines["groups of two"] = f"{timestep} --num-groups {episodes // 2} --group-size 2"
        lines["one group"] = f"{timestep} --num-groups 1 --group-size {episodes}"
        lines["outcome, --no-seed-groups"] = f"{outcome} --no-seed-groups"
        for name, scale in SCALES.items():
            script = f"docs/examples/scaling.py --scale {scale}"
            lines[name] = timestep.replace("grpo_rtg.py", script)
        for name, line in lines.items():
            yield SEEDS, env, name, command(env, STEPS[env], line)


DEFAULT_STEPS = {"CartPole-v1": 200_000, "Acrobot-v1": 500_000, "Pendulum-v1": 500_000}
DEFAULT_STEPS |= {"LunarLander-v3": 1_000_000}
DISPATCH = "docs.examples.dispatch:Dispatch-v0"
SECONDS_STEPS = DEFAULT_STEPS | {"HalfCheetah-v5": 250_000, DISPATCH: 200_000}
FURTHER_STEPS = {"FrozenLake-v1": 100_000, "MountainCarContinuous-v0": 300_000}
REPORTED_STEPS = DEFAULT_STEPS | {"LunarLanderContinuous-v3": 1_000_000} | FURTHER_STEPS
GRPO_TRIED = [(4, 4, 8, 256, "3e-3"), (4, 4, 8, 512, "5e-3"), (4, 4, 8, 1024, "5e-3")]
GRPO_TRIED += [(2, 8, 8, 512, "3e-3"), (2, 8, 8, 1024, "5e-3"), (3, 8, 8, 1024, "5e-3")]
GRPO_TRIED += [(4, 8, 8, 256, "3e-3"), (4, 8, 8, 512, "3e-3"), (4, 8, 8, 1024, "5e-3")]
GRPO_TRIED += [(4, 8, 8, 1024, "5e-3 --ent-coef 0.01")]  # an option may follow the rate
PPO_TRIED = [(16, 256, 10, 128, "1e-3"), (16, 256, 10, 128, "1e-3 --ent-coef 0.01")]
PPO_TRIED += [(16, 256, 10, 256, "1e-3"), (16, 256, 10, 256, "1.5e-3"), (16, 256, 10, 256, "2e-3")]


def tuning():
    """Iterations for the defaults of the scripts; some were tried with few scripts and seeds."""
    for env, steps in DEFAULT_STEPS.items():
        for script in ("grpo_outcome.py", "grpo_process.py", "grpo_rtg.py", "ppo.py"):
            for tried in PPO_TRIED if script == "ppo.py" else GRPO_TRIED:
                name = "{} {}x{}, {} passes of {}, {}".format(script, *tried)
                own = ppo(*tried, 0.98) if script == "ppo.py" else f"--ent-coef 0 {shape(*tried)}"
                yield TUNING_SEEDS, env, name, command(env, steps, f"{script} {own}")


def entropy():
    """Does a small entropy bonus free policies that stand still, and what does it cost?"""
    for env, steps in (DEFAULT_STEPS | FURTHER_STEPS).items():
        seeds = TUNING_SEEDS if env == "Acrobot-v1" else TUNING_SEEDS[:5]
        for weight in ("0", "0.0001", "0.001"):
            line = command(env, steps, f"grpo_rtg.py --ent-coef {weight}")
            yield seeds, env, f"grpo_rtg.py {weight}", line


def noise(*names: str) -> list[str]:
    return [f"docs.examples.noise:{name}-v0" for name in names]


DOSE = {"seeded": "grpo_rtg.py", "not seeded": "grpo_rtg.py --no-seed-groups", "PPO": "ppo.py"}
PENDULUMS = noise("Pendulum0", "Pendulum3", "Pendulum10", "Pendulum30")
ACROBOTS = noise("Acrobot0", "Acrobot3", "Acrobot10")


def dose():
    """Noise of σ in rewards, which a group shares if it is seeded; judged without noise."""
    for env in PENDULUMS + ACROBOTS:
        for variant, script in DOSE.items():
            yield SEEDS, env, variant, command(env, 200_000, script)


RESERVOIR, PORTFOLIO, BACKLOG = noise("Reservoir", "Portfolio", "Backlog")
LOST_SALES, PUSHES, WIND, SMALL = noise("LostSales", "Pushes", "Wind", "ScaledDispatch")
BLACKJACK = "Blackjack-v1"
SCALED = "PPO, rewards / 100"
EXACT = {BLACKJACK: "--eval-episodes 10000"}  # returns of single hands are -1, 0 or 1


# SB3's PPO with VecNormalize and what ppo.py has; a text is a rate that falls linearly to 0.
SB3 = {"normalize": True, "n_envs": 16, "n_steps": 256, "batch_size": 128, "gamma": 0.99}
SB3["learning_rate"] = "1e-3"


def sb3(**settings) -> str:
    return f"--settings {json.dumps(SB3 | settings, separators=(',', ':'))}"


GROUPS = [f"--num-groups 2 --group-size 8 --gamma {x}" for x in ("0.99", "1")]
GROUPS += [f"--num-groups 8 --group-size 4 --gamma {x}" for x in ("0.99", "1")]
LAMBDAS = [f"--gamma {x} --gae-lambda {y}" for x in ("0.99", "1") for y in ("0.98", "1")]
OF_PPO = ["--gae-lambda 0.98", "--gae-lambda 1", "--gae-lambda 1 --learning-rate 3e-4"]
OF_PPO += ["--gae-lambda 1 --gamma 1"]
OF_PPO += [f"--num-envs 8 --num-steps 128 --gae-lambda {x}" for x in ("0.98", "1")]
OF_SB3 = [sb3(gae_lambda=0.98), sb3(gae_lambda=1), sb3(gae_lambda=1, learning_rate="3e-4")]
OF_SB3 += [sb3(gae_lambda=1, gamma=1)]
OF_SB3 += [sb3(n_envs=8, n_steps=128, gae_lambda=x) for x in (0.98, 1)]  # OF_PPO's six
TRIED = {  # columns: a script, and its settings
    "outcome": ("grpo_outcome.py --norm-obs", GROUPS),
    "timestep": ("grpo_rtg.py --norm-obs", GROUPS),
    "not seeded": ("grpo_rtg.py --no-seed-groups --norm-obs", GROUPS),
    "regression": ("docs/examples/regression.py --norm-obs", LAMBDAS),
    "PPO": ("ppo.py --norm-obs", OF_PPO),
    "SB3": ("docs/benchmark/sb3.py", OF_SB3),
}
LUCK = dict.fromkeys((DISPATCH, RESERVOIR, PORTFOLIO, BACKLOG, LOST_SALES), 200_000)  # steps
LUCK |= {PUSHES: 100_000, BLACKJACK: 100_000, WIND: 500_000}
TUNED = [env for env in LUCK if env != LOST_SALES]  # it has Backlog's settings


def luck_tuning():
    """Where luck that the seed fixes decides: four settings of each column, six of PPO."""
    for env in TUNED:
        for column, (script, settings) in TRIED.items():
            if column == "PPO" and env in (DISPATCH, BACKLOG):
                script += " --ent-coef 0"  # its default, too
            for options in settings:
                line = command(env, LUCK[env], f"{script} {options} {EXACT.get(env, '')}")
                yield TUNING_SEEDS[:2], env, f"{column} {options}", line
    for options in OF_PPO:
        line = command(SMALL, 200_000, f"ppo.py --norm-obs --ent-coef 0 {options}")
        yield TUNING_SEEDS[:2], DISPATCH, f"{SCALED} {options}", line


def chosen(env: str, column: str) -> str:
    """A column's script with the best of its settings, and what the environment needs."""
    script, settings = TRIED["PPO" if column == SCALED else column]
    tuned = best("luck_tuning", BACKLOG if env == LOST_SALES else env, column, settings)
    return f"{script} {tuned} {EXACT.get(env, '')}"


def luck():
    """Each column with the best of its settings; and controls."""
    for env, steps in LUCK.items():
        for column in TRIED:
            yield SEEDS, env, column, command(env, steps, chosen(env, column))
    yield SEEDS, DISPATCH, SCALED, command(SMALL, 200_000, chosen(DISPATCH, SCALED))
    line = chosen(DISPATCH, "regression").replace("--norm-obs", "--no-seed-groups --norm-obs")
    yield SEEDS, DISPATCH, "regression, not seeded", command(DISPATCH, 200_000, line)
    line = command(RESERVOIR, 1_000_000, chosen(RESERVOIR, "PPO"))
    yield SEEDS[:5], RESERVOIR, "PPO, 1M steps", line
    for name, options in (("2x8", ""), ("4x8", "--num-groups 4")):
        line = command(WIND, LUCK[WIND], f"grpo_rtg.py {options}")
        yield SEEDS, WIND, f"{name}, no --norm-obs", line
    line = chosen(WIND, "PPO").replace("--norm-obs ", "")
    yield SEEDS, WIND, "PPO, no --norm-obs", command(WIND, LUCK[WIND], line)


ENVS = [*LUCK, *PENDULUMS]  # of variances.py
ENVS += [env for env in STEPS if env not in ("Acrobot-v1", "Pendulum-v1")] + ACROBOTS


def members():
    """Few large groups or many small ones, as many episodes in an iteration."""
    for env, steps in LUCK.items():
        for groups, size in ((2, 16), (4, 8), (8, 4), (16, 2)):
            line = f"{chosen(env, 'timestep')} --num-groups {groups} --group-size {size}"
            yield SEEDS, env, f"{groups}x{size}", command(env, steps, line)


def twice():
    """grpo_rtg.py with twice the steps, and one run of ppo.py with its own, for their seconds."""
    for seeds, env, variant, line in (*ladder(), *luck()):
        if env not in ("FrozenLake-v1", "Hopper-v5", "HalfCheetah-v5", *LUCK):
            continue
        if variant == "timestep":
            steps = (STEPS | LUCK)[env]
            yield seeds, env, variant, line.replace(f"timesteps {steps}", f"timesteps {2 * steps}")
        if variant == "PPO":
            yield SEEDS[:1], env, variant, line


def defaults():
    """What the scripts do with nothing but an environment and its steps."""
    for script, seeds in DEFAULTS_SEEDS.items():
        for env, steps in REPORTED_STEPS.items():
            yield seeds, env, script, command(env, steps, script)


STUDIES = {"ladder": ladder, "million": million, "unseen": unseen, "ablations": ablations}
STUDIES |= {"tuning": tuning, "defaults": defaults, "entropy": entropy, "dose": dose}
STUDIES |= {"luck_tuning": luck_tuning, "luck": luck, "members": members, "twice": twice}
STUDIES |= {"discount_tuning": discount_tuning, "still": still}


def jobs(study: str) -> dict[tuple[str, str, str], str]:
    """The command of each environment, variant and seed: every setting, before the next seed."""
    found = {}
    for seeds, env, variant, line in STUDIES[study]():
        found |= {(env, variant, str(seed)): f"{line} --seed {seed}" for seed in seeds}
    return dict(sorted(found.items(), key=lambda job: int(job[0][2])))
