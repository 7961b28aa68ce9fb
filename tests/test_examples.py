"""docs/examples: what they compute, that they train and resume, and the environments' rules."""

import itertools
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

sys.path.append(str(Path(__file__).parents[1] / "docs" / "examples"))
import critic
import gpg
import plot_runs
import regression
import scaling

import grpo_rtg
from docs.examples import arithmetic, dispatch, luck, noise, preferences, wrappers
from tests import child
from tests.test_maths import to_go

OWN_OPTIONS = {"regression": "--gae-lambda=0.9", "critic": "--gae-lambda=0.9"}
OWN_OPTIONS |= {"gpg": "--bin-width=0.5", "scaling": "--scale=step"}
TINY = ["--total-timesteps=1500", "--minibatch-size=32", "--update-epochs=2", "--norm-obs"]
TINY += ['--env-kwargs={"max_episode_steps": 20}', "--eval-episodes=3", "--checkpoint-interval=0"]


def make_episodes(lengths, truncated, obs=None):
    """Episodes of these lengths [K, G], random rewards and, unless given, observations [S, 3]."""
    torch.manual_seed(0)
    lengths = torch.tensor(lengths)
    mask = torch.arange(lengths.max()) < lengths[..., None]
    rewards = torch.randn(mask.shape).double().where(mask, 0)
    obs = torch.randn(int(mask.sum()), 3) if obs is None else obs
    return grpo_rtg.Episodes(obs, obs, rewards, mask, torch.tensor(truncated), infos=[])


def in_episodes(episodes, column):
    """What each step has [S], as an array for each episode."""
    return np.split(np.asarray(column), episodes.mask.sum(dim=-1).flatten().cumsum(0)[:-1])


def mean_squares(advantages, episodes):
    return (advantages.square().sum(dim=(1, 2)) / (episodes.mask.sum(dim=(1, 2)) - 1)).tolist()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_regression_is_least_squares_and_gae(gae_lambda, gamma=0.8):
    """After a cut by a time limit returns go on by the last fit, and b is the last step's."""
    episodes = make_episodes([[9, 4, 1], [2, 7, 9]], [[True, False, True], [False, False, True]])
    weights = np.random.default_rng(0).normal(size=129)  # of the last fit
    plug_in = regression.Regression()
    plug_in.load_state_dict({"weights": torch.from_numpy(weights)})
    args = regression.Args(gamma=gamma, gae_lambda=gae_lambda, norm_std=False)
    advantages = plug_in(episodes, args)
    rewards = in_episodes(episodes, episodes.rewards[episodes.mask])
    times = [t for r in rewards for t in range(len(r))]
    inputs = np.column_stack([episodes.obs.double(), times])
    inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0, ddof=1)
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.randn(4, 128, generator=generator).numpy() / (2 * np.sqrt(4))
    phases = 2 * np.pi * torch.rand(128, generator=generator).numpy()
    features = np.column_stack([np.ones(len(times)), np.cos(inputs @ frequencies + phases)])
    rows = in_episodes(episodes, features)
    last = [x[-1] * cut for x, cut in zip(rows, episodes.truncated.flatten().tolist())]
    returns = [to_go([*r, x @ weights], gamma)[:-1] for r, x in zip(rewards, last)]
    ridge = np.sqrt(1e-3 * len(times)) * np.eye(129)[1:]  # not on the constant
    targets = [*np.concatenate(returns), *np.zeros(128)]
    weights = np.linalg.lstsq(np.vstack([features, ridge]), targets)[0]
    expected = []
    for r, x, end in zip(rewards, rows, last):
        b = np.append(x @ weights, end @ weights)
        if gae_lambda == 1:
            expected += list(to_go([*r, b[-1]], gamma) - b)[:-1]  # R - b
        else:
            expected += to_go(r + gamma * b[1:] - b[:-1], gamma * gae_lambda)
    assert advantages[episodes.mask].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert mean_squares(plug_in(episodes, regression.Args()), episodes) == pytest.approx([1, 1])


@pytest.mark.parametrize(("truncated", "max_grad_norm"), [(False, 0.0), (True, 0.5)])
def test_the_critic_learns_the_values(truncated, max_grad_norm):
    """Of three states that follow each other and pay 1: V = 7/4, 3/2, 1, or all 2 if they go on."""
    obs = torch.eye(3).repeat(2, 1)
    episodes = make_episodes([[3, 3]], [[truncated] * 2], obs)
    episodes = episodes._replace(rewards=torch.ones_like(episodes.rewards))
    options = {"learning_rate": 1e-2, "anneal_lr": False, "update_epochs": 20, "norm_std": False}
    args = critic.Args(gamma=0.5, max_grad_norm=max_grad_norm, norm_obs=True, **options)
    plug_in = critic.Critic()
    for _ in range(10):
        advantages = plug_in(episodes, args)
    expected = [2.0, 2.0, 2.0] if truncated else [1.75, 1.5, 1.0]
    assert plug_in.network.value(obs[:3]).tolist() == pytest.approx(expected, abs=0.05)
    assert advantages.abs().max() < 0.05 and plug_in.network.obs_count == 10 * 6
    assert mean_squares(plug_in(episodes, critic.Args()), episodes) == pytest.approx([1])


def test_bins_against_a_loop():
    """Algorithm 2 of the paper with dictionaries, and R - b as the advantage."""
    torch.manual_seed(0)
    state = torch.randn(33, 2).round()  # some of ten, many times
    obs = 1e3 * state + torch.rand(state.shape)
    episodes = make_episodes([[5, 9, 1], [7, 2, 9]], [[True] * 3] * 2, obs)
    advantages = gpg.advantages_of(episodes, gpg.Args(gamma=0.9, bin_width=0.1, norm_std=False))
    returns = [to_go(r, 0.9) for r in in_episodes(episodes, episodes.rewards[episodes.mask])]
    states = [list(map(tuple, x)) for x in in_episodes(episodes, state)]
    visits = {}
    for pairs in map(zip, states, returns):
        for own_state, value in dict(reversed(list(pairs))).items():  # first visits
            visits.setdefault(own_state, []).append(value)
    assert len(visits) < len(state) / 2
    b = [np.mean(visits[x]) for x in sum(states, [])]
    assert advantages[episodes.mask].tolist() == pytest.approx(np.subtract(sum(returns, []), b))
    assert mean_squares(gpg.advantages_of(episodes, gpg.Args()), episodes) == pytest.approx([1, 1])


def test_scales_against_a_loop():
    """Leave-one-out and the own std of a time step, with two groups; one alone has 0."""
    episodes = make_episodes([[5, 9, 1], [7, 2, 9]], [[True] * 3] * 2)
    rewards = in_episodes(episodes, episodes.rewards[episodes.mask])
    returns = [to_go(r, 0.9) for r in rewards]
    others, of_step = [], []
    for i, own in enumerate(returns):
        group = returns[i // 3 * 3 : i // 3 * 3 + 3]
        for t, value in enumerate(own):
            alive = [r[t] for r in group if len(r) > t]
            alone = len(alive) == 1
            others.append(0 if alone else value - (sum(alive) - value) / (len(alive) - 1))
            of_step.append(0 if alone else (value - np.mean(alive)) / np.std(alive, ddof=1))
    args = scaling.Args(gamma=0.9, scale="step")
    assert scaling.advantages_of(episodes, args)[episodes.mask].tolist() == pytest.approx(of_step)
    found = scaling.advantages_of(episodes, scaling.Args(gamma=0.9))
    assert mean_squares(found, episodes) == pytest.approx([1, 1])
    ratios = found[episodes.mask][:15] / torch.tensor(others[:15])  # of the first group: 1 / std
    assert ratios[np.array(others[:15]) != 0].std() < 1e-9
    tie = episodes._replace(rewards=torch.ones_like(episodes.rewards))
    assert not scaling.advantages_of(tie._replace(mask=tie.mask | True), args).any()


def test_what_a_seed_and_a_state_explain():
    """Within two groups of two a variance of 2, between them 7; at t = 1 one group has one left."""
    x = torch.tensor([[[1.0, 9], [3, 0]], [[5, 2], [7, 4]]])
    mask = torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 1]]], dtype=torch.bool)
    assert luck.seed_share(x, mask) == pytest.approx(7 / (7 + 2))
    random = make_episodes([[40] * 8] * 8, [[False] * 8] * 8)
    states = random._replace(rewards=random.obs[:, 0].double().view(random.mask.shape))
    others = states._replace(obs=states.obs.flip(0), rewards=states.rewards.flip(0, 1, 2))
    assert (luck.predictions(states, others, 0.0) - others.rewards).square().mean() < 0.1
    assert luck.predictions(random, states, 0.0).square().mean() < 0.2  # nothing to see


def test_leave_one_out_and_ratios_of_variances():
    """By hand: against the others' means; variances of 4 + 0 and 1 + 0."""
    returns = torch.tensor([[[5.0, 1], [2, 3], [2, 0]]])
    mask = torch.tensor([[[1, 1], [1, 0], [1, 0]]], dtype=torch.bool)
    assert luck.leave_one_out(returns, mask).tolist() == [[[3, 0], [-1.5, 0], [-1.5, 0]]]
    nearly = torch.tensor([[[1.0], [1 + 1e-9], [1.0]]], dtype=torch.float64)  # rounding
    assert not luck.leave_one_out(nearly, nearly > 0).any()
    small = torch.tensor([[1.0, 7], [2, 7], [3, 7]])
    assert luck.ratio(2 * small + 9, small)[0] == pytest.approx(400)
    with pytest.raises(grpo_rtg.UserError, match="All groups tie"):
        luck.ratio(small, 0 * small)
    rng = np.random.default_rng(0)
    points = []
    for _ in range(400):  # a 95% interval holds the truth
        draws = (torch.from_numpy(rng.normal(0, scale, (64, 30))) for scale in (1.2, 1.0))
        points.append(luck.ratio(*draws))
    held = np.mean([low < 144 < high for _, low, high in points])
    assert 0.92 < held < 0.98 and np.mean(points, axis=0)[0] == pytest.approx(144, rel=0.02)


def test_gradients_of_groups_are_those_of_the_loss():
    args = grpo_rtg.Args(ent_coef=0, group_size=3)
    episodes = make_episodes([[5, 9, 1], [7, 2, 9]], [[True] * 3] * 2)
    spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (3,))
    policy = grpo_rtg.Policy(*spaces, args)
    advantages = grpo_rtg.advantages_of(episodes, args)
    found = luck.gradients(policy, episodes, advantages).sum(0) / episodes.mask.sum()
    batch = grpo_rtg.make_batch(episodes, advantages, policy, policy, args)
    grpo_rtg.grpo_loss(policy, batch, args)[0].backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert torch.allclose(-found.float(), expected, rtol=1e-4, atol=1e-6) and expected.any()


def test_noise_that_the_seed_fixes_calls_for_seeded_groups(monkeypatch, capsys):
    """With σ = 30 a step it is nearly all that differs between returns; a group cancels it."""
    monkeypatch.setattr(luck, "NUM_EPISODES", 64)
    noisy = {"env_id": "docs.examples.noise:Pendulum30-v0", "total_timesteps": 1}
    luck.main(luck.Args(**noisy, eval_episodes=1))
    new, trained = capsys.readouterr().out.split("With ")[1:]
    assert "a new policy" in new and "3,200 steps of training" in trained
    for printed in (new, trained):
        assert float(re.search(r"(\S+) is the seed's", printed)[1]) > 0.9
        needed = [float(x) for x in re.findall(r"^  (\S+) \(", printed, re.MULTILINE)]
        assert len(needed) == 2 and min(needed) > 400, printed


def test_noise_is_the_seeds_alone_and_evaluations_have_none():
    noisy, plain = gym.make("docs.examples.noise:Pendulum10-v0"), gym.make("Pendulum-v1")

    def drawn(seed, action):
        starts = noisy.reset(seed=seed)[0], plain.reset(seed=seed)[0]
        assert np.array_equal(*starts)
        return [noisy.step([action])[1] - plain.step([action])[1] for _ in range(9)]

    assert drawn(3, 0.0) == pytest.approx(drawn(3, 1.0)) and 3 < np.std(drawn(3, 0.0)) < 30
    assert drawn(10**9, 0.0) == [0] * 9 and drawn(4, 0.0) != drawn(3, 0.0)


def test_rewards_of_others_are_summed_and_divided_and_time_may_be_final():
    def costs(**options):
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda x: np.array([x, 2 * x]))

    gym.register("Costs-v0", costs, max_episode_steps=9)
    for final in (True, False):
        env = noise.rescaled("Costs-v0", 100, final)
        env.reset(seed=1)
        ends = [env.step(i % 2)[1:4] for i in range(9)]
        assert ends == [(0.03, False, False)] * 8 + [(0.03, final, not final)]


def test_a_server_works_through_its_queue():
    """4 and 2 of work at speed 2: two jobs wait for 2, then one for 1."""
    queue = [4.0, 2.0]
    assert dispatch.serve(queue, 2.0, 1.0) == 2 and queue == [2.0, 2.0]
    assert dispatch.serve(queue, 2.0, np.inf) == 2 + 1 and queue == []


def test_runs_are_told_apart_by_their_options(monkeypatch, capsys):
    for gamma, seed in itertools.product((0.9, 0.99), (1, 2)):
        child.train("grpo_rtg", gamma=gamma, seed=seed)
    child.train("ppo", **child.env("Countdown"))
    runs = [plot_runs.read(x, "charts/episodic_return") for x in Path("runs").iterdir()]
    counts = {name: len(x) for name, x in plot_runs.lines_of(runs, []).items()}
    assert counts == {"grpo_rtg, gamma 0.9": 2, "grpo_rtg, gamma 0.99": 2, "ppo": 1}
    assert len(plot_runs.lines_of(runs, ["num_groups"])) == 2
    panels = plot_runs.panels_of([Path("runs")], "charts/episodic_return", [])
    assert panels.keys() == {"CartPole-v1", "Countdown-v0"}
    pytest.importorskip("seaborn")
    options = plot_runs.Options([Path("runs")], out=Path("curves.pdf"))
    plot_runs.main(options)
    assert Path("curves.pdf").stat().st_size > 1000
    apart = [({"seed": "1"}, np.array([[x, x + 1], [0, 0]])) for x in (0, 2)]
    monkeypatch.setattr(plot_runs, "panels_of", lambda *x: {"A-v0": {"grpo_rtg": apart}})
    with pytest.raises(SystemExit):
        plot_runs.main(options)
    assert "ends before another begins" in capsys.readouterr().err


def test_wrappers_mend_what_people_bring(monkeypatch):
    """Starts of a global generator, the interface of old gym, one simulator for a process."""
    new, own = (gym.make("tests.envs:Countdown-v0", ends=["truncated"]) for _ in range(2))
    old = SimpleNamespace(seed=lambda seed: setattr(old, "reset", lambda: own.reset(seed=seed)[0]))
    old.step = lambda action: (*own.step(action)[:2], own.unwrapped.taken == 7, {})
    spaces = own.observation_space, own.action_space
    process = wrappers.OwnProcess(lambda: gym.make("tests.envs:Countdown-v0", ends=["truncated"]))
    for env, ends in ((process, [False, True]), (wrappers.OldGym(old, *spaces), [True, False])):
        assert env.reset(seed=2)[0].tolist() == new.reset(seed=2)[0].tolist() == [7, 0]
        for _ in range(7):
            obs, reward, *over, _ = env.step(1)
            expected, paid, *_ = new.step(1)
            assert obs.tolist() == expected.tolist() and reward == paid
        assert over == ends
    process.close()
    monkeypatch.setattr(type(own.unwrapped), "reset", lambda self, **_: (np.random.rand(1), {}))
    env = wrappers.Seeded(own.unwrapped)
    before = np.random.get_state()[1].tolist()
    assert env.reset(seed=3)[0] == env.reset(seed=3)[0] != env.reset(seed=4)[0]
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_an_example_trains_resumes_and_is_played(name, monkeypatch, capsys):
    """A killed run ends as an unbroken one; resumed once more, nothing is left to do."""

    def python(script, *argv):
        monkeypatch.setattr(sys, "argv", [script, *argv])
        monkeypatch.setattr(sys, "path", [str(Path(script).parent), *sys.path])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    def kill(run, file):
        save(run, file)
        raise KeyboardInterrupt

    script = sys.modules[name].__file__
    with pytest.raises(SystemExit, match="^0$"):
        python(script, "--help")
    trained = python(script, *TINY, OWN_OPTIONS[name])
    [whole] = Path("runs").glob(f"CartPole-v1__{name}__1__*/checkpoint.pt")
    played = python(grpo_rtg.__file__, "--evaluate", str(whole))
    assert re.search("Greedy evaluation.*", played)[0] in trained
    save = grpo_rtg.Run.save
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(grpo_rtg.Run, "save", kill)
        python(script, *TINY, OWN_OPTIONS[name])
    [killed] = set(Path("runs").glob("*/checkpoint.pt")) - {whole}
    for _ in range(2):
        python(script, "--resume", str(killed))
        states = [torch.load(path) for path in (killed, whole)]
        for part in states[0].keys() - {"args", "progress"}:
            torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)


def test_the_environments_keep_the_rules():
    names = ["grid_world:GridWorld", "preferences:PreferredGridWorld", "dispatch:Dispatch"]
    for name in [*names, "arithmetic:Arithmetic", "arithmetic:ArithmeticProcess"]:
        env = gym.make(f"docs.examples.{name}-v0")
        check_env(env.unwrapped, skip_render_check=False)
        assert env.spec.max_episode_steps <= 200


def test_the_wrapper_pays_once_at_the_end():
    """Also where the limit cuts the episode with the step that arrives."""
    for seed, limit in itertools.product(range(40), (1, 50)):
        limited = gym.wrappers.TimeLimit(preferences.grid_world.GridWorld(), limit)
        env = preferences.EpisodeScore(limited, preferences.prefers_short_ways)
        env.reset(seed=seed)
        rewards, over = [], False
        while not over:
            _, reward, arrived, truncated, _ = env.step(0)
            rewards.append(reward)
            over = arrived or truncated
        score = -float(len(rewards) ** 2) if arrived else -1e6
        assert rewards == [0.0] * (len(rewards) - 1) + [score]


@pytest.mark.slow
def test_grpo_raises_the_accuracy_of_a_pretrained_policy(capsys):
    """The example itself: every script gains on unseen prompts."""
    held_out, train = ({tuple(p) for p in x} for x in arithmetic.SPLITS.values())
    assert len(held_out) > 80 and len(held_out | train) == 400 and not held_out & train
    arithmetic.main()
    shares = dict(re.findall(r"^(\w+).*?(\d+)%", capsys.readouterr().out, re.M))
    assert list(shares) == ["pretrained", "grpo_outcome", "grpo_process", "grpo_rtg"]
    before, *after = map(int, shares.values())
    assert 30 < before < 70 and min(after) >= before + 8, shares
