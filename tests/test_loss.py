"""The objective, its gradient and the update. Eq. 3 as a scalar loop is in test_oracle.py."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import grpo_rtg
import ppo

OBS = gym.spaces.Box(-1, 1, (3,))
COEFS = {"clip_coef": 0.2, "kl_coef": 0.0, "ent_coef": 0.0}
METRICS = {"policy_loss", "kl", "entropy", "approx_kl", "clipfrac", "grad_norm", "minibatches"}


def make_policy(module=grpo_rtg):
    torch.manual_seed(0)
    policy_class = module.ActorCritic if module is ppo else module.Policy
    return policy_class(OBS, gym.spaces.Discrete(2), module.Args(hidden_size=8))


@pytest.fixture
def policy():
    return make_policy()


def make_batch(policy, size=64):
    """A flat batch of random steps with π_old = π_ref = the policy."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(size, 3, generator=generator)
    actions = torch.randint(0, 2, (size, 1), generator=generator)
    log_probs = policy.log_probs(obs, actions)
    return {
        "obs": obs,
        "actions": actions,
        "advantages": torch.randn(size, generator=generator),
        "returns": torch.randn(size, generator=generator),
        "weights": torch.rand(size, generator=generator) + 0.5,
        "old_log_probs": log_probs,
        "ref_log_probs": log_probs.clone(),
    }


def gradient(policy, loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(policy.parameters()))])


def test_kl_pulls_towards_the_reference(policy):
    """Published bugs: no gradient, being of detached log-probabilities; the other way round.

    π_ref/π_θ - log(π_ref/π_θ) - 1 at π_ref = e π_θ is e - 2; the other way round it is 1/e.
    """
    batch = make_batch(policy) | {"advantages": torch.zeros(64), "weights": torch.ones(64)}
    batch["ref_log_probs"] = batch["old_log_probs"] + 1
    loss, metrics = grpo_rtg.grpo_loss(policy, batch, 0.2, 1.0, 0.0)
    assert metrics["losses/kl"].item() == pytest.approx(math.e - 2, rel=1e-5)
    log_probs = policy(batch["obs"]).log_prob(batch["actions"])
    expected = gradient(policy, (1 - math.e) * log_probs.mean())  # d KL / d log π_θ = 1 - π_ref/π_θ
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(policy, loss), expected, rtol=0, atol=1e-6)


def test_coefficients_of_0_leave_kl_and_entropy_out(policy):
    """Value and gradient, to the bit, even where π_ref/π_θ has overflowed."""
    batch = make_batch(policy)
    batch["old_log_probs"] = batch["old_log_probs"] + torch.linspace(-0.5, 0.5, 64)
    far = batch | {"ref_log_probs": torch.full((64,), torch.inf)}
    loss, metrics = grpo_rtg.grpo_loss(policy, far, **COEFS)
    ratio = (policy(batch["obs"]).log_prob(batch["actions"]) - batch["old_log_probs"]).exp()
    surrogate = torch.min(*(x * batch["advantages"] for x in (ratio, ratio.clamp(0.8, 1.2))))
    expected = -(batch["weights"] * surrogate).mean()
    assert loss == expected == metrics["losses/policy_loss"]
    assert torch.equal(gradient(policy, loss), gradient(policy, expected))


@pytest.mark.parametrize("module", [grpo_rtg, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("far", [-200.0, 200.0])
def test_far_away_policies_give_finite_losses_and_gradients(module, far):
    """exp(200) overflows: log-ratios are bounded before it, both to π_old and to π_ref."""
    policy = make_policy(module)
    batch = make_batch(policy)
    loss_fn = ppo.ppo_loss if module is ppo else grpo_rtg.grpo_loss
    for name in ("old_log_probs", "ref_log_probs"):
        moved = batch | {name: batch[name] + far}
        loss, metrics = loss_fn(policy, moved, 0.2, 0.1, 0.1)
        assert loss.isfinite() and all(x.isfinite() for x in metrics.values())
        assert gradient(policy, loss).isfinite().all()


class TestUpdate:
    def run(self, policy, monkeypatch, size=128, module=grpo_rtg, **options):
        """Metrics of an update by plain gradient descent, and each minibatch that it saw."""
        name = "ppo_loss" if module is ppo else "grpo_loss"
        loss = getattr(module, name)
        seen = []

        def watched(policy, batch, *coefs):
            seen.append((batch, coefs))
            return loss(policy, batch, *coefs)

        monkeypatch.setattr(module, name, watched)
        args = module.Args(**{"update_epochs": 3, "minibatch_size": 32} | options)
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        batch = make_batch(policy, size)
        metrics = module.update(policy, optimizer, batch, args, np.random.default_rng(0))
        return metrics, seen

    def test_every_step_is_used_once_in_each_pass(self, policy, monkeypatch):
        metrics, seen = self.run(policy, monkeypatch, size=130, target_kl=0)
        seen = [batch["advantages"] for batch, _ in seen]
        assert [len(advantages) for advantages in seen] == [33, 33, 32, 32] * 3
        everything = make_batch(policy, 130)["advantages"].sort().values
        for i in range(0, 12, 4):
            assert torch.equal(torch.cat(seen[i : i + 4]).sort().values, everything)
        assert not torch.equal(seen[0], seen[4])  # shuffled anew
        assert set(metrics) == {f"losses/{name}" for name in METRICS}
        assert metrics["losses/minibatches"] == 12

    @pytest.mark.parametrize(("size", "number"), [(1, 1), (47, 1), (49, 2), (127, 4)])
    def test_minibatches_have_about_the_size(self, policy, monkeypatch, size, number):
        metrics, seen = self.run(policy, monkeypatch, size=size, update_epochs=1, target_kl=0)
        assert len(seen) == number and np.isfinite(list(metrics.values())).all()

    @pytest.mark.parametrize("limit", [0.3, 0])
    def test_steps_are_descents_by_the_clipped_gradient(self, policy, monkeypatch, limit):
        metrics, seen = self.run(policy, monkeypatch, target_kl=0, max_grad_norm=limit)
        by_hand = make_policy()
        norms = []
        for batch, coefs in list(seen):
            slope = gradient(by_hand, grpo_rtg.grpo_loss(by_hand, batch, *coefs)[0])
            norms.append(float(slope.norm()))
            theta = parameters_to_vector(by_hand.parameters())
            theta = theta - 0.1 * slope * (min(1, limit / norms[-1]) if limit else 1)
            vector_to_parameters(theta.detach(), by_hand.parameters())
        assert min(norms) < 0.3 < max(norms)
        torch.testing.assert_close(policy.state_dict(), by_hand.state_dict())
        assert metrics["losses/grad_norm"] == pytest.approx(np.mean(norms))  # as they were

    def test_target_kl_is_looked_at_before_each_step(self, policy, monkeypatch):
        _, seen = self.run(policy, monkeypatch, minibatch_size=1000, target_kl=1e-9)
        assert len(seen) == 2  # the first step is seen to have been too much
        once = make_policy()
        self.run(once, monkeypatch, minibatch_size=1000, update_epochs=1)
        torch.testing.assert_close(policy.state_dict(), once.state_dict(), rtol=0, atol=0)

    @pytest.mark.parametrize("module", [grpo_rtg, ppo], ids=["grpo", "ppo"])
    def test_each_coefficient_is_its_options(self, monkeypatch, module):
        own = {"vf_coef": 0.3} if module is ppo else {"kl_coef": 0.3}
        options = {"clip_coef": 0.1, "ent_coef": 0.2} | own
        _, seen = self.run(make_policy(module), monkeypatch, module=module, **options)
        expected = (0.1, 0.2, 0.3) if module is ppo else (0.1, 0.3, 0.2)
        assert {coefs for _, coefs in seen} == {expected}


def test_adam_is_torchs():
    """The same steps as torch's, to the last bit, and states that each can go on from."""
    own, torchs = grpo_rtg.Adam, torch.optim.Adam
    for first, second in (own, own), (own, torchs), (torchs, own):
        nets = [make_policy().net, make_policy().net]
        optimizers = [first(nets[0].parameters(), 0.1), torchs(nets[1].parameters(), 0.1)]
        for i in range(6):
            if i == 3:
                state = optimizers[0].state_dict()
                optimizers[0] = second(nets[0].parameters(), 9.0)
                optimizers[0].load_state_dict(state)
            for net, optimizer in zip(nets, optimizers):
                optimizer.zero_grad()
                assert all(parameter.grad is None for parameter in net.parameters())
                net(torch.ones(5, 3) + i).square().sum().backward()
                optimizer.step()
            torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=0, atol=0)
