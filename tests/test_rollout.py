"""The rollout, the actions' way to the environment, and evaluation, which all files share."""

import time
import weakref
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import grpo_rtg as grpo
import ppo
from tests.envs import ChooseLength, Countdown, Target

SMALL = grpo.Args(hidden_size=8)
SPACES = {
    "Discrete": spaces.Discrete(4),
    "MultiDiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "Box": spaces.Box(-9, 9, (3,)),
}


def make_policy(env, **options):
    torch.manual_seed(0)
    args = replace(SMALL, **options)
    return grpo.Policy(env.observation_space, env.action_space, args)


def policy_for(space, **options):
    """For four numbers; its outputs differ from observation to observation."""
    torch.manual_seed(0)
    policy = grpo.Policy(spaces.Box(-1, 1, (4,)), space, replace(SMALL, **options))
    torch.nn.init.normal_(policy.net[-1].weight)
    return policy


def collect(env_class, **kwargs):
    """The environments and episodes of two groups of three."""
    envs = [env_class() for _ in range(6)]
    rng = np.random.default_rng(0)
    return envs, grpo.collect_groups(envs, make_policy(envs[0]), 2, rng, **kwargs)


def starts(episodes):
    """The first observations [K, G, D]."""
    lengths = episodes.mask.sum(dim=-1)
    ends = lengths.flatten().cumsum(dim=0)
    return episodes.obs[ends - lengths.flatten()].view(*lengths.shape, -1)


def test_a_group_starts_equal_and_groups_differ():
    _, episodes = collect(lambda: gym.make("CartPole-v1"))
    first = starts(episodes)
    assert first.shape == (2, 3, 4)
    assert (first == first[:, :1]).all() and (first[0] != first[1]).all()
    assert episodes.mask.shape == episodes.rewards.shape and episodes.mask.shape[:2] == (2, 3)
    assert len(episodes.mask.sum(-1).unique()) > 1  # they differ by the actions they sampled
    _, apart = collect(lambda: gym.make("CartPole-v1"), seed_groups=False)
    assert len(starts(apart).flatten(0, 1).unique(dim=0)) == 6


def test_only_living_environments_are_stepped():
    envs, episodes = collect(ChooseLength)
    lengths = episodes.mask.sum(-1).flatten()
    assert [env.steps_taken_ever for env in envs] == lengths.tolist()
    assert len(lengths.unique()) > 1
    assert len(episodes.obs) == len(episodes.actions) == lengths.sum()


@pytest.mark.parametrize("how_it_ends", ["terminated", "truncated"])
def test_flat_steps_and_padded_blocks_agree(how_it_ends):
    """Countdown's observation is (length, steps taken) and pays 1, 2, …: every number is known."""
    _, episodes = collect(lambda: Countdown(how_it_ends))
    lengths = starts(episodes)[..., 0]  # [K, G]
    t = torch.arange(episodes.mask.shape[-1])
    assert torch.equal(episodes.mask, t < lengths[..., None])
    assert torch.equal(episodes.rewards, (t + 1.0).double() * episodes.mask)
    flat_lengths = lengths[..., None].expand(episodes.mask.shape)[episodes.mask]
    assert torch.equal(episodes.obs[:, 0], flat_lengths)
    assert torch.equal(episodes.rewards[episodes.mask], episodes.obs[:, 1] + 1.0)
    assert (episodes.truncated == (how_it_ends == "truncated")).all()


def test_a_batch_has_each_steps_own_numbers():
    """Its advantage and weight, and log π_old and log π_ref of its observation and action."""
    envs, episodes = collect(ChooseLength)
    policy, reference = make_policy(envs[0]), make_policy(envs[0])
    torch.nn.init.normal_(reference.net[-1].weight)
    advantages = torch.randn(episodes.mask.shape)
    weights = grpo.step_weights(episodes.mask, "trajectory")
    args = grpo.Args(loss_agg="trajectory", ref_update_interval=0)
    batch = grpo.make_batch(episodes, advantages, policy, reference, args)
    steps = episodes.mask.nonzero().tolist()  # by group, member and time: the order of obs
    for i, (k, g, t) in enumerate(steps):
        assert batch["advantages"][i] == advantages[k, g, t]
        assert batch["weights"][i] == weights[k, g, t].float()
    actions = episodes.actions[:, 0]
    for name, network in (("old_log_probs", policy), ("ref_log_probs", reference)):
        expected = network.net(episodes.obs).log_softmax(-1)[range(len(steps)), actions]
        torch.testing.assert_close(batch[name], expected.detach())
    args.ref_update_interval = 1  # π_ref is then π_old
    batch = grpo.make_batch(episodes, advantages, policy, policy, args)
    assert batch["ref_log_probs"] is batch["old_log_probs"]


@pytest.mark.parametrize(("interval", "pattern"), [(0, "=≠≠≠≠"), (1, "====="), (2, "=≠=≠=")])
def test_the_reference_is_renewed_before_sampling(interval, pattern, monkeypatch):
    """Every so many iterations π_ref is the policy that samples; between them it stays."""
    seen, make_batch = "", grpo.make_batch

    def watched(episodes, advantages, policy, reference, args):
        nonlocal seen
        pairs = zip(policy.parameters(), reference.parameters())
        seen += "=" if all(torch.equal(*pair) for pair in pairs) else "≠"
        return make_batch(episodes, advantages, policy, reference, args)

    monkeypatch.setattr(grpo, "make_batch", watched)
    args = grpo.Args(env_id="tests.envs:FromFive-v0", group_size=2, num_groups=2, eval_episodes=1)
    args.total_timesteps, args.ref_update_interval = 5 * 40, interval
    grpo.train(args)
    assert seen == pattern


def test_log_probs_are_those_of_the_actions_sampled():
    """Frequencies of sampled choices against the softmax of the logits, 5 standard errors."""
    space = SPACES["MultiDiscrete"]
    policy = policy_for(space)
    obs = np.tile(np.float32([0.3, -0.2, 0.9, 0.1]), (20_000, 1))
    actions = torch.from_numpy(policy.act(obs, np.random.default_rng(0)))
    with torch.no_grad():
        choices = policy(torch.from_numpy(obs[:1])).base_dist.probs[0]  # [A, C]
        likeliest = policy.act(obs[:1])
        joint = policy.log_probs(torch.from_numpy(obs), actions)
    for choice, (p, options) in enumerate(zip(choices, grpo.num_options(space))):
        frequencies = actions[:, choice].bincount(minlength=len(p)) / 20_000
        assert ((frequencies - p).abs() <= 5 * (p * (1 - p) / 20_000).sqrt()).all()
        assert likeliest[0, choice] == p.argmax() and (p > 0.01).sum() == options
    expected = torch.stack([choices[i, actions[:, i]].log() for i in range(len(choices))]).sum(0)
    torch.testing.assert_close(joint, expected)


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("kind", SPACES)
def test_what_acts_is_what_forward_says(kind, norm_obs):
    """Greedily and sampled, after a change of the weights, of an activation and of forward, too."""
    policy, obs = policy_for(SPACES[kind], norm_obs=norm_obs), torch.randn(50, 4)
    before = policy(obs).mode
    policy.obs_stats.update(3 * obs + 1)
    assert torch.equal(before, policy(obs).mode) == (not norm_obs)
    for _ in range(2):
        expected = policy(obs).mode.detach()
        np.testing.assert_allclose(policy.act(obs.numpy()), expected, rtol=1e-4, atol=1e-5)
        policy.net[0].weight.data.neg_()
        policy.net[1] = policy.net[3] = torch.nn.ReLU()
    mirrored = [policy.act(-obs.numpy(), rng) for rng in (None, np.random.default_rng(0))]
    forward = policy.forward
    policy.forward = lambda obs: forward(-obs)
    acted = [policy.act(obs.numpy(), rng) for rng in (None, np.random.default_rng(0))]
    assert np.array_equal(acted, mirrored)


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3, start=5, dtype=dtype) for dtype in (np.int64, np.int32, np.uint8)]
    + [spaces.MultiDiscrete([[2, 3]], dtype=np.int16, start=[[4, -1]]), spaces.MultiBinary((2, 2))],
    ids=str,
)
def test_actions_have_the_spaces_type_and_shape(space):
    actions = policy_for(space).act(np.zeros((9, 4), np.float32), np.random.default_rng(0))
    assert all(space.contains(action) for action in grpo.to_env(actions, space))


def test_box_actions_are_clipped_at_the_door_only():
    """The environment sees its bounds and shape; log-probabilities are of the unclipped sample."""
    env = gym.wrappers.FlattenObservation(Target())
    policy = make_policy(env, log_std_init=2.0)
    obs = np.zeros((200, env.observation_space.shape[0]), np.float32)
    actions = policy.act(obs, np.random.default_rng(0))
    given = grpo.to_env(actions, env.action_space)
    assert actions.shape == (200, 2) and given[0].shape == (2, 1) and given[0].dtype == np.float32
    assert actions.min() < -1 and actions.max() > 3
    assert np.array_equal(np.stack(given)[..., 0], actions.clip(-1, 3))
    assert actions.std() == pytest.approx(np.e**2, rel=0.1)
    assert abs(actions.mean()) < 5 * np.e**2 / 20


def test_bounded_actions_are_rescaled():
    """To [-1, 1]: as they are, a mean near 0 could be near one end of the range."""
    env = grpo.make_env(grpo.Args(env_id="tests.envs:Target-v0"))
    env.reset(seed=0)
    for given, reward in (-1, -18), (0, -2), (0.5, 0), (1, -2):  # two numbers of -1, 1, 2, 3
        [action] = grpo.to_env(np.full((1, 2), given), env.action_space)
        assert env.step(action)[1] == pytest.approx(reward, abs=1e-6)


def test_images_stay_bytes():
    """Until the network, in what a rollout keeps and in a batch."""
    rng, args = np.random.default_rng(0), grpo.Args(env_id="tests.envs:Picture-v0")
    envs = [grpo.make_env(args) for _ in range(4)]
    policy = make_policy(envs[0])
    episodes = grpo.collect_groups(envs, policy, 2, rng)
    batch = grpo.make_batch(episodes, torch.zeros(episodes.mask.shape), policy, policy, args)
    critic = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, ppo.Args())
    steps = ppo.collect_steps(ppo.Running(envs, rng), critic, 15, rng)
    for obs in episodes.obs, batch["obs"], steps.obs, steps.next_obs:
        assert obs.dtype == torch.uint8 and obs.shape[-1] == 108 and obs.max() > 250


def test_an_evaluation_keeps_no_observations():
    """Only the batch that is acted on is alive, and sometimes the one before."""
    args = grpo.Args(env_id="tests.envs:Picture-v0", eval_episodes=45)
    policy = make_policy(grpo.make_env(args))
    act, batches, alive = policy.act, [], []

    def watched(obs, rng):
        batches.append(weakref.ref(obs))
        alive.append(sum(batch() is not None for batch in batches))
        return act(obs, rng)

    policy.act = watched
    grpo.evaluate(policy, args, seed=0)
    assert len(alive) == 30 and max(alive) <= 2


def test_an_evaluation_of_more_than_a_second_shows_a_bar(capsys):
    args = grpo.Args(env_id="tests.envs:FromFive-v0", eval_episodes=2)
    policy = make_policy(grpo.make_env(args))
    act = policy.act
    for seconds in 0, 0.12:  # a step
        policy.act = lambda *x: time.sleep(seconds) or act(*x)  # noqa: B023
        grpo.evaluate(policy, args, seed=0)
        assert ("Evaluating: " in capsys.readouterr().err) == (seconds > 0)


def test_statistics_of_parts_are_those_of_the_whole():
    """Of numbers far from 0, and of a column that is constant but for what float32 makes of it."""
    x = 1000.1 + 5 * torch.randn(9000, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 1000.1
    for sizes in ([9000], [1, 2, 5000, 3997]):  # updates merge 4096 at a time
        stats = grpo.RunningMeanVar(2)
        for part in x.split(sizes):
            stats.update(part)
            assert stats.normalize(x)[:, 1].abs().max() < 1e-6
        whole = x.double().numpy()
        np.testing.assert_allclose(stats.mean, whole.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(stats.var, whole.var(axis=0), rtol=1e-9, atol=1e-9)
        expected = (whole - whole.mean(axis=0)) / np.sqrt(whole.var(axis=0) + 1e-8)
        np.testing.assert_allclose(stats.normalize(x), expected, atol=1e-6)
    assert stats.normalize(torch.tensor([[1e9, -1e9]])).tolist() == [[10, -10]]


def test_evaluate():
    """45 episodes in 20 environments: number i is that of reset(seed=seed + i)."""
    args = grpo.Args(env_id="tests.envs:ChooseLength-v0", eval_episodes=45)
    env = ChooseLength()
    policy = make_policy(env)
    policy.net[-1].bias.data = torch.tensor([0.1, 0.0])  # action 1 ends an episode
    lengths = [env.reset(seed=7 + i)[0][0] for i in range(45)]
    greedy = grpo.evaluate(policy, args, seed=7)
    assert greedy.tolist() == [sum(range(1, int(length) + 1)) for length in lengths]
    args.greedy = False
    sampled, same = (grpo.evaluate(policy, args, seed=7) for _ in range(2))
    assert (sampled == same).all() and sampled.mean() < greedy.mean()


def test_spaces_are_flattened_only_where_needed():
    assert not isinstance(grpo.make_env(grpo.Args()), gym.wrappers.FlattenObservation)
    for env_id, size in (("FrozenLake-v1", 16), ("Blackjack-v1", 45), ("tests.envs:Target-v0", 7)):
        env = grpo.make_env(grpo.Args(env_id=env_id))
        assert env.observation_space.shape == (size,) == env.reset(seed=0)[0].shape


@pytest.mark.parametrize(("option", "limit"), [(0, 200), (7, 7), (600, 600)])
def test_episodes_are_cut(option, limit):
    """By --max-episode-steps, else the environment's limit, else after 1,000 steps."""
    env = grpo.make_env(grpo.Args(env_id="MountainCar-v0", max_episode_steps=option))
    env.reset(seed=0)
    cut = [env.step(0)[3] for _ in range(limit)]
    assert cut[-1] and not any(cut[:-1])
    unlimited = grpo.make_env(grpo.Args(env_id="Blackjack-v1", max_episode_steps=option))
    assert unlimited.spec.max_episode_steps == (option or 1000)
