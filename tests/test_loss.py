"""The objective, its gradient and its averages. Eq. 3 as a scalar loop is in test_oracle.py."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch

import grpo_outcome
import grpo_rtg
import ppo
from tests import child

OBS = gym.spaces.Box(-1, 1, (3,))
COEFS = {"clip_coef": 0.2, "kl_coef": 0.0, "ent_coef": 0.0}


def make_batch(policy, size=64, seed=0):
    """A flat batch of random steps with π_old = π_ref = the policy."""
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "obs": torch.randn(size, 3, generator=generator),
        "actions": torch.randint(0, 2, (size,), generator=generator),
        "advantages": torch.randn(size, generator=generator),
        "weights": torch.rand(size, generator=generator) + 0.5,
    }
    with torch.no_grad():
        batch["log_probs"] = policy.log_prob_and_entropy(batch["obs"], batch["actions"])[0]
    return batch | {"ref_log_probs": batch["log_probs"].clone()}


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return grpo_rtg.Policy(OBS, gym.spaces.Discrete(2), 8)


def gradient(policy, loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(policy.parameters()))])


def test_first_pass_has_ratio_one(policy):
    """The surrogate is the weighted mean advantage, nothing is clipped, and no KL has built up."""
    batch = make_batch(policy)
    loss, metrics = grpo_rtg.grpo_loss(policy, batch, 0.2, 0.04, 0.0)
    assert loss.item() == pytest.approx(
        -(batch["weights"] * batch["advantages"]).mean().item(), abs=1e-6
    )
    assert (
        metrics["clipfrac"] == 0 and abs(metrics["approx_kl"]) < 1e-6 and abs(metrics["kl"]) < 1e-6
    )


def test_first_gradient_is_the_policy_gradient(policy):
    batch = make_batch(policy)
    log_probs = policy.log_prob_and_entropy(batch["obs"], batch["actions"])[0]
    expected = gradient(policy, -(batch["weights"] * batch["advantages"] * log_probs).mean())
    assert torch.allclose(
        gradient(policy, grpo_rtg.grpo_loss(policy, batch, **COEFS)[0]), expected, atol=1e-6
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"), [(1, 1.5, 0), (1, 0.5, 1), (-1, 0.5, 0), (-1, 1.5, 1)]
)
def test_clipping_is_pessimistic(policy, advantage, ratio, moves):
    """Beyond 1±ε there is no gradient in the direction already taken, and all of it on the way
    back.
    """
    batch = make_batch(policy) | {"advantages": torch.full((64,), float(advantage))}
    batch["log_probs"] = batch["log_probs"] - np.log(ratio)
    loss, metrics = grpo_rtg.grpo_loss(policy, batch, **COEFS)
    assert bool(gradient(policy, loss).abs().max() > 1e-6) == bool(moves)
    assert metrics["clipfrac"] == 1


def test_kl_pulls_towards_the_reference(policy):
    """The published bug: on detached log-probabilities the penalty has no gradient and holds
    nobody.
    """
    batch = make_batch(policy) | {"advantages": torch.zeros(64)}
    batch["ref_log_probs"] = batch["ref_log_probs"] + torch.linspace(-1, 1, 64)
    loss, metrics = grpo_rtg.grpo_loss(policy, batch, 0.2, 1.0, 0.0)
    log_probs = policy.log_prob_and_entropy(batch["obs"], batch["actions"])[0]
    # d KL / d log π_θ = 1 - π_ref / π_θ
    slope = 1 - (batch["ref_log_probs"] - log_probs.detach()).exp()
    expected = gradient(policy, (batch["weights"] * slope * log_probs).mean())
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradient(policy, loss), expected, atol=1e-6)
    assert metrics["kl"] > 0


def test_kl_ratio_is_the_right_way_round(policy):
    """π_ref/π_θ - log(π_ref/π_θ) - 1 at π_ref = e π_θ is e - 2; the other way round it is 1/e."""
    batch = make_batch(policy) | {"weights": torch.ones(64)}
    batch["ref_log_probs"] = batch["log_probs"] + 1
    assert grpo_rtg.grpo_loss(policy, batch, **COEFS)[1]["kl"].item() == pytest.approx(
        np.e - 2, rel=1e-5
    )


def test_kl_estimates_the_exact_divergence(policy):
    """Averaged over all actions with π_θ's probabilities, Eq. 4 is KL(π_θ, π_ref)."""
    reference = grpo_rtg.Policy(OBS, gym.spaces.Discrete(2), 8)
    torch.nn.init.normal_(reference.net[-1].weight)
    obs = torch.randn(5, 3).repeat_interleave(2, 0)
    pi, ref = (
        torch.distributions.Categorical(logits=network(obs)) for network in (policy, reference)
    )
    actions = torch.arange(2).repeat(5)
    batch = {
        "obs": obs,
        "actions": actions,
        "log_probs": pi.log_prob(actions),
        "ref_log_probs": ref.log_prob(actions),
    }
    batch |= {"advantages": torch.zeros(10), "weights": 2 * pi.log_prob(actions).exp()}
    with torch.no_grad():
        kl = grpo_rtg.grpo_loss(policy, batch, **COEFS)[1]["kl"]
    assert kl.item() == pytest.approx(
        torch.distributions.kl_divergence(pi, ref).mean().item(), rel=1e-4
    )


def test_entropy_bonus_flattens_the_policy(policy):
    torch.nn.init.normal_(policy.net[-1].weight)
    batch = make_batch(policy) | {"advantages": torch.zeros(64)}
    entropies = policy.log_prob_and_entropy(batch["obs"], batch["actions"])[1]
    expected = gradient(policy, -(batch["weights"] * entropies).mean())
    assert torch.allclose(
        gradient(policy, grpo_rtg.grpo_loss(policy, batch, 0.2, 0.0, 1.0)[0]), expected, atol=1e-6
    )


@pytest.mark.parametrize("loss_agg", ["trajectory", "step"])
def test_weights_average_as_they_say(loss_agg):
    lengths = torch.tensor([[3, 1, 4], [1, 5, 2]])
    mask = torch.arange(5) < lengths[..., None]
    values = torch.randn(mask.shape, dtype=torch.float64)
    mean = (grpo_outcome.step_weights(mask, loss_agg) * values)[mask].mean()
    episodes = [values[k, g, : lengths[k, g]] for k in range(2) for g in range(3)]
    by_trajectory = torch.stack([episode.mean() for episode in episodes]).mean()
    expected = by_trajectory if loss_agg == "trajectory" else torch.cat(episodes).mean()
    assert mean.item() == pytest.approx(expected.item())


def test_minibatches_average_to_the_whole(policy):
    """With weights inside the mean, equal minibatches of any shuffle estimate the objective without
    bias.
    """
    batch = make_batch(policy)
    whole = gradient(policy, grpo_rtg.grpo_loss(policy, batch, **COEFS)[0])
    parts = torch.randperm(64).split(16)
    losses = [
        grpo_rtg.grpo_loss(policy, {name: x[i] for name, x in batch.items()}, **COEFS)[0]
        for i in parts
    ]
    assert torch.allclose(
        torch.stack([gradient(policy, loss) for loss in losses]).mean(0), whole, atol=1e-6
    )


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(4), gym.spaces.Box(-1, 1, (2,))], ids=["Discrete", "Box"]
)
def test_log_probs_and_entropy_are_those_of_the_outputs(space):
    torch.manual_seed(0)
    policy, obs = grpo_rtg.Policy(OBS, space, 8), torch.randn(6, 3)
    if isinstance(space, gym.spaces.Discrete):
        actions, p = torch.tensor([0, 1, 2, 3, 0, 1]), policy(obs).double().exp()
        p /= p.sum(1, keepdim=True)
        expected = p[range(6), actions].log(), -(p * p.log()).sum(1)
    else:
        torch.nn.init.normal_(policy.log_std)
        actions, mean, log_std = torch.randn(6, 2), policy(obs).double(), policy.log_std.double()
        density = (-0.5 * ((actions - mean) / log_std.exp()) ** 2).exp() / (
            log_std.exp() * (2 * torch.pi) ** 0.5
        )
        expected = density.log().sum(1), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum().expand(6)
    for given, wanted in zip(policy.log_prob_and_entropy(obs, actions), expected):
        assert given.shape == (6,) and torch.allclose(given.double(), wanted, atol=1e-5)


class TestUpdate:
    def run(self, policy, monkeypatch, size=64, loss=None, **options):
        """Metrics of an update by plain gradient descent, and the minibatches that it saw."""
        loss, seen = loss or grpo_rtg.grpo_loss, []

        def watched(policy, batch, *coefs):
            seen.append(batch)
            return loss(policy, batch, *coefs)

        monkeypatch.setattr(grpo_rtg, "grpo_loss", watched)
        args = grpo_rtg.Args(**{"update_epochs": 3, "num_minibatches": 4} | options)
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        batch, rng = make_batch(policy, size), np.random.default_rng(0)
        return grpo_rtg.update(policy, optimizer, batch, args, rng), seen

    def test_every_step_is_used_once_in_each_pass(self, policy, monkeypatch):
        metrics, seen = self.run(policy, monkeypatch, size=66)
        assert [len(batch["obs"]) for batch in seen] == [17, 17, 16, 16] * 3
        everything = make_batch(policy, 66)["advantages"].sort().values
        for i in range(3):
            of_pass = torch.cat([batch["advantages"] for batch in seen[4 * i : 4 * i + 4]])
            assert torch.equal(of_pass.sort().values, everything)
        assert not torch.equal(seen[0]["advantages"], seen[4]["advantages"])  # shuffled anew
        names = {"policy_loss", "kl", "entropy", "approx_kl", "clipfrac", "grad_norm"}
        assert set(metrics) == names

    def test_target_kl_ends_the_passes(self, policy, monkeypatch):
        _, seen = self.run(policy, monkeypatch, update_epochs=9, target_kl=1e-9)
        assert 4 <= len(seen) < 36 and len(seen) % 4 == 0

    def test_gradient_norm_is_clipped(self, policy, monkeypatch):
        before = torch.nn.utils.parameters_to_vector(policy.parameters())
        self.run(policy, monkeypatch, update_epochs=1, num_minibatches=1, max_grad_norm=0.001)
        moved = torch.nn.utils.parameters_to_vector(policy.parameters()) - before
        assert moved.norm().item() == pytest.approx(0.1 * 0.001, rel=1e-2)

    def test_minibatches_are_never_empty(self, policy, monkeypatch):
        metrics, seen = self.run(policy, monkeypatch, size=3)
        assert np.isfinite(metrics["policy_loss"]) and all(len(batch["obs"]) for batch in seen)

    def test_a_diverged_kl_that_has_no_weight_does_no_harm(self, policy, monkeypatch):
        """π_ref/π_θ overflows where π_ref is far away; with β = 0 it is only logged."""

        def far(policy, batch, *coefs):
            batch = batch | {"ref_log_probs": batch["log_probs"] + 200}
            return loss(policy, batch, *coefs)

        loss = grpo_rtg.grpo_loss
        metrics, _ = self.run(policy, monkeypatch, loss=far)
        assert metrics["kl"] == float("inf") and np.isfinite(metrics["policy_loss"])
        assert all(x.isfinite().all() for x in policy.parameters())


@pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])
def test_nan_is_not_trained_on(script, monkeypatch, cli):
    module = importlib.import_module(script)
    name = "ppo_loss" if script == "ppo" else "grpo_loss"
    loss = getattr(module, name)

    def broken(*args):
        value, metrics = loss(*args)
        return value * float("nan"), metrics

    monkeypatch.setattr(module, name, broken)
    status, _, err = cli(script, "--eval-episodes", 1)
    assert status == 2 and "The update became NaN or infinite: lower --learning-rate." in err


# only the unfused steps would add to the graph of gradients
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("script", child.SCRIPTS)
def test_adam_is_torchs(script, fused):
    """The same steps as torch's, to the last bit, and states that each can go on from."""
    own, torchs = importlib.import_module(script).Adam, torch.optim.Adam
    for first, second in (own, own), (own, torchs), (torchs, own):
        nets = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
        nets[1].load_state_dict(nets[0].state_dict())
        optimizers = [
            make(net.parameters(), 0.1, eps=1e-5, fused=fused)
            for make, net in zip((first, torchs), nets)
        ]
        generator = torch.Generator().manual_seed(0)
        for i in range(6):
            if i == 3:
                state, net = optimizers[0].state_dict(), nets[0]
                optimizers[0] = second(net.parameters(), 9.0, fused=fused)
                optimizers[0].load_state_dict(state)
            x = torch.randn(5, 3, generator=generator)
            for net, optimizer in zip(nets, optimizers):
                optimizer.zero_grad()
                assert all(parameter.grad is None for parameter in net.parameters())
                net(x).square().sum().backward()
                optimizer.step()
            for given, expected in zip(nets[0].parameters(), nets[1].parameters()):
                assert torch.equal(given, expected)


def test_ppo_value_loss_reaches_only_the_critic():
    torch.manual_seed(0)
    policy = ppo.ActorCritic(OBS, gym.spaces.Discrete(2), 8)
    batch = make_batch(policy) | {"returns": torch.randn(64), "advantages": torch.zeros(64)}
    ppo.ppo_loss(policy, batch, clip_coef=0.2, ent_coef=0.0, vf_coef=0.5)[0].backward()
    assert all((x.grad == 0).all() for x in policy.net.parameters())
    assert all((x.grad != 0).any() for x in policy.critic.parameters())
