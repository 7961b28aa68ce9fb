"""The rollout, the actions' way to the environment, and evaluation. What all files share is tested
in one of them.
"""

import re
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

import grpo_rtg as grpo
from tests.envs import ChooseLength, Countdown, FromFive, Hostile, IgnoresSeed, Target, TurnsNaN


def make_policy(env, **kwargs):
    torch.manual_seed(0)
    return grpo.Policy(env.observation_space, env.action_space, 8, **kwargs)


def collect(env_class, size=6, num_groups=2, seed=0, **kwargs):
    envs = [env_class() for _ in range(size)]
    episodes = grpo.collect_groups(
        envs, make_policy(envs[0]), num_groups, np.random.default_rng(seed), **kwargs
    )
    return envs, episodes


def test_a_group_starts_equal_and_groups_differ():
    envs = [gym.make("CartPole-v1") for _ in range(6)]
    episodes = grpo.collect_groups(envs, make_policy(envs[0]), 2, np.random.default_rng(0))
    starts = episodes.obs[:6].view(2, 3, 4)
    assert (starts == starts[:, :1]).all() and (starts[0] != starts[1]).all()
    assert episodes.mask.shape == episodes.rewards.shape and episodes.mask.shape[:2] == (2, 3)
    assert len(episodes.mask.sum(-1).unique()) > 1  # they differ by the actions they sampled


def test_every_iteration_draws_fresh_seeds():
    envs, rng = [gym.make("CartPole-v1") for _ in range(2)], np.random.default_rng(0)
    first, second = (grpo.collect_groups(envs, make_policy(envs[0]), 1, rng) for _ in range(2))
    assert (first.obs[0] != second.obs[0]).any()


def test_without_seeded_groups_members_start_apart():
    envs = [gym.make("CartPole-v1") for _ in range(6)]
    episodes = grpo.collect_groups(
        envs, make_policy(envs[0]), 2, np.random.default_rng(0), seed_groups=False
    )
    assert len(episodes.obs[:6].unique(dim=0)) == 6


def test_the_same_seed_gives_the_same_rollout():
    one, other, third = (collect(ChooseLength, seed=seed)[1] for seed in (0, 0, 1))
    assert all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("obs", "actions", "rewards", "mask")
    )
    assert one.obs.shape != third.obs.shape or not torch.equal(one.obs, third.obs)


def test_an_environment_that_ignores_its_seed_is_refused():
    with pytest.raises(grpo.UserError, match=r"IgnoresSeed.* ignores reset.*--no-seed-groups"):
        collect(IgnoresSeed)
    assert collect(IgnoresSeed, seed_groups=False)[1] is not None


def test_only_living_environments_are_stepped():
    envs, episodes = collect(ChooseLength)
    lengths = episodes.mask.sum(-1).flatten()
    assert [env.steps_taken_ever for env in envs] == lengths.tolist()
    assert len(lengths.unique()) > 1
    assert len(episodes.obs) == len(episodes.actions) == lengths.sum()


def test_flat_steps_and_padded_blocks_agree():
    """Countdown's observation is (length, steps taken) and pays 1, 2, …: every number is known."""
    _, episodes = collect(Countdown)
    lengths = episodes.obs[:6, 0].view(2, 3)
    t = torch.arange(episodes.mask.shape[-1])
    assert torch.equal(episodes.mask, t < lengths[..., None])
    assert torch.equal(episodes.rewards, (t + 1.0).double() * episodes.mask)
    flat_lengths = episodes.flatten(lengths[..., None].expand(episodes.mask.shape))
    assert torch.equal(episodes.obs[:, 0], flat_lengths)
    assert torch.equal(episodes.flatten(episodes.rewards), episodes.obs[:, 1] + 1.0)


def test_a_batch_has_each_steps_own_numbers():
    """Its advantage and weight, and log π_old and log π_ref of its observation and action."""
    envs, episodes = collect(ChooseLength)
    policy, reference = make_policy(envs[0]), make_policy(envs[0])
    torch.nn.init.normal_(reference.net[-1].weight)
    advantages, weights = (
        torch.randn(episodes.mask.shape),
        grpo.step_weights(episodes.mask, "trajectory"),
    )
    args = grpo.Args(loss_agg="trajectory", ref_update_interval=0)
    batch = grpo.make_batch(episodes, advantages, policy, reference, args)
    steps = episodes.mask.flatten(0, 1).T.nonzero()  # time and member, in the order of obs
    for i, (t, member) in enumerate(steps.tolist()):
        k, g = divmod(member, 3)
        assert batch["advantages"][i] == advantages[k, g, t]
        assert batch["weights"][i] == weights[k, g, t].float()
    for name, network in (("log_probs", policy), ("ref_log_probs", reference)):
        expected = network(episodes.obs).log_softmax(-1)[range(len(steps)), episodes.actions]
        torch.testing.assert_close(batch[name], expected.detach())
    args.ref_update_interval = 1  # π_ref is then π_old
    batch = grpo.make_batch(episodes, advantages, policy, policy, args)
    assert batch["ref_log_probs"] is batch["log_probs"]


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


def test_log_probs_of_the_batch_are_those_that_sampled():
    """Frequencies of sampled actions against the softmax of the logits, 5 standard errors."""
    torch.manual_seed(0)
    policy = grpo.Policy(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4), 8)
    torch.nn.init.normal_(policy.net[-1].weight, std=0.5)
    obs = np.tile(np.float32([0.3, -0.2, 0.9]), (20_000, 1))
    actions = torch.from_numpy(policy.sampler(np.random.default_rng(0))(obs))
    with torch.no_grad():
        p = policy.log_prob_and_entropy(torch.from_numpy(obs[:4]), torch.arange(4))[0].exp()
    error = (actions.bincount(minlength=4) / 20_000 - p).abs()
    assert (error < 5 * (p * (1 - p) / 20_000).sqrt()).all() and p.min() > 0.01
    assert policy.sampler(None)(obs[:1])[0] == p.argmax()


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(3), gym.spaces.Box(-9, 9, (3,))], ids=["Discrete", "Box"]
)
def test_the_sampler_has_the_policys_network(space, norm_obs):
    """Greedy actions against forward(); changed weights reach the next sampler, not this one."""
    policy, obs = grpo.Policy(gym.spaces.Box(-1, 1, (4,)), space, 8, norm_obs), torch.randn(50, 4)
    torch.nn.init.normal_(policy.net[-1].weight)
    torch.nn.init.normal_(policy.net[0].bias)
    policy.update_obs_stats(3 * obs + 1)
    old = policy.sampler(None)
    for _ in range(2):
        outputs = policy(obs).detach().numpy()
        expected = outputs.argmax(1) if policy.discrete else outputs
        given = policy.sampler(None)(obs.numpy())
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            policy.net[0].weight.neg_()
    assert not np.allclose(old(obs.numpy()), expected)


def test_the_sampler_heeds_another_activation():
    """As of who copies a file and changes mlp: what samples stays what is differentiated."""
    policy = grpo.Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Box(-9, 9, (3,)), 8)
    obs = torch.randn(50, 4)
    torch.nn.init.normal_(policy.net[-1].weight)
    policy.net[1] = policy.net[3] = torch.nn.ReLU()
    given, expected = policy.sampler(None)(obs.numpy()), policy(obs).detach().numpy()
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


def test_log_probs_of_a_long_rollout_are_those_of_its_steps():
    policy, obs = (
        grpo.Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3), 8),
        torch.randn(9000, 4),
    )
    actions, whole = torch.arange(9000) % 3, policy(obs).log_softmax(-1)
    log_probs = policy.log_probs(obs, actions)
    assert not log_probs.requires_grad
    torch.testing.assert_close(log_probs, whole[torch.arange(9000), actions].detach())


def test_discrete_actions_count_from_the_spaces_start():
    _, episodes = collect(lambda: gym.wrappers.FlattenObservation(FromFive()))
    assert set(episodes.actions.tolist()) == {0, 1, 2}
    assert torch.equal(episodes.flatten(episodes.rewards), (episodes.actions == 2).double())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_discrete_actions_have_the_spaces_type(dtype):
    space = gym.spaces.Discrete(3, start=5, dtype=dtype)
    policy = grpo.Policy(gym.spaces.Box(-1, 1, (4,)), space, 8)
    actions = policy.sampler(np.random.default_rng(0))(np.zeros((9, 4), np.float32))
    assert actions.dtype == np.int64
    assert all(space.contains(action) for action in policy.to_env(actions))


def test_box_actions_are_clipped_at_the_door_only():
    """The environment sees its bounds and shape; log-probabilities are of the unclipped sample."""
    env = gym.wrappers.FlattenObservation(Target())
    policy = make_policy(env)
    policy.log_std.data.fill_(2.0)
    obs = np.zeros((200, env.observation_space.shape[0]), np.float32)
    actions = policy.sampler(np.random.default_rng(0))(obs)
    given = policy.to_env(actions)
    assert actions.shape == (200, 2) and given[0].shape == (2, 1) and given[0].dtype == np.float32
    assert actions.min() < -1 and actions.max() > 3
    assert np.array_equal(np.stack(given)[..., 0], actions.clip(-1, 3))
    assert actions.std() == pytest.approx(np.e**2, rel=0.1)
    assert abs(actions.mean()) < 5 * np.e**2 / 20


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_nan_is_refused_once_a_rollout(what):
    with pytest.raises(grpo.UserError, match=r"TurnsNaN.* gives .* that are not finite"):
        collect(lambda: TurnsNaN(what))


def test_what_an_environment_raises_is_noted_with_seed_step_and_action():
    envs = [Hostile("step raises"), Hostile("step raises")]
    seed = np.random.default_rng(0).integers(2**31, size=1)[0]
    with pytest.raises(RuntimeError, match="the simulator") as raised:
        grpo.collect_groups(envs, make_policy(envs[0]), 1, np.random.default_rng(0))
    [note] = raised.value.__notes__
    assert re.fullmatch(rf"<Hostile.*>: reset\(seed={seed}\), step 3: [01]", note)
    envs = [Hostile("reset raises")]
    with pytest.raises(RuntimeError, match="the simulator") as raised:
        grpo.play_episodes(envs, make_policy(envs[0]), [7])
    assert re.fullmatch(r"<Hostile.*>: reset\(seed=7\), step 0: None", raised.value.__notes__[0])


class TestObservationStatistics:
    batches = (
        torch.randn(3, 50, 3, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 10, 0.1])
        + 5
    )

    def make(self):
        return grpo.Policy(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), 8, norm_obs=True)

    def test_merged_batches_are_as_one(self):
        policy = self.make()
        for batch in self.batches.split([1, 2]):
            policy.update_obs_stats(batch.flatten(0, 1))
        everything = self.batches.flatten(0, 1)
        assert torch.allclose(policy.obs_mean, everything.mean(0), rtol=1e-5)
        assert torch.allclose(policy.obs_var, everything.var(0, correction=0), rtol=1e-4)
        normal = policy.normalize(everything)
        assert normal.mean(0).abs().max() < 1e-3 and (normal.std(0) - 1).abs().max() < 1e-2
        assert policy.normalize(1e6 * everything).unique().tolist() == [-10, 10]

    def test_off_means_off(self):
        policy = grpo.Policy(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), 8)
        policy.update_obs_stats(self.batches[0])
        assert torch.equal(policy.normalize(self.batches[1]), self.batches[1])

    def test_they_are_saved_with_the_policy(self):
        policy, other = self.make(), self.make()
        policy.update_obs_stats(self.batches[0])
        other.load_state_dict(policy.state_dict())
        assert torch.equal(other(self.batches[1]), policy(self.batches[1]))


class TestEvaluate:
    args = grpo.Args(env_id="tests.envs:ChooseLength-v0", eval_episodes=45)

    def test_episodes_and_seeds(self):
        """45 episodes in 20 environments: episode i is that of reset(seed=seed + i), however they
        are dealt out.
        """
        env = ChooseLength()
        policy = make_policy(env)
        policy.net[-1].bias.data = torch.tensor([9.0, 0.0])  # never ends early
        lengths = [env.reset(seed=7 + i)[0][0] for i in range(45)]
        expected = [sum(range(1, int(length) + 1)) for length in lengths]
        assert grpo.evaluate(policy, self.args, seed=7).tolist() == expected

    def test_greedy_and_sampled(self):
        policy = make_policy(ChooseLength())
        policy.net[-1].bias.data = torch.tensor([0.1, 0.0])
        greedy, again = (grpo.evaluate(policy, self.args) for _ in range(2))
        sampled, same = (grpo.evaluate(policy, replace(self.args, greedy=False)) for _ in range(2))
        assert (greedy == again).all() and (sampled == same).all()
        assert sampled.mean() < greedy.mean()


def test_spaces_are_flattened_only_where_needed():
    assert not isinstance(grpo.make_env("CartPole-v1"), gym.wrappers.FlattenObservation)
    for env_id, size in (("FrozenLake-v1", 16), ("Blackjack-v1", 45), ("tests.envs:Target-v0", 7)):
        env = grpo.make_env(env_id)
        assert env.observation_space.shape == (size,) == env.reset(seed=0)[0].shape


@pytest.mark.parametrize(
    ("env_id", "option", "limit"),
    [("CartPole-v1", 0, 500), ("CartPole-v1", 7, 7), ("CartPole-v1", 600, 600)],
)
def test_episodes_are_cut(env_id, option, limit):
    assert grpo.make_env(env_id, option).spec.max_episode_steps == limit
    assert grpo.make_env("tests.envs:NoLimit-v0").spec.max_episode_steps == 1000
