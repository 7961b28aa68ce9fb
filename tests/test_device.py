"""The scripts with --cuda on a stand-in for a GPU: no devices mix, and only what performance.md
names crosses or waits.

tests/test_gpu.py is for real ones.
"""

import importlib

import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests import child
from tests.stand_in import DEVICE, Device

some = ["grpo_rtg", "ppo"]  # the other two share all of it with grpo_rtg
some += [pytest.param(x, marks=pytest.mark.slow) for x in ("grpo_outcome", "grpo_process")]


class Torch:
    """torch, as a script sees it that finds one GPU: the stand-in."""

    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        get_device_name = staticmethod(lambda device: "a stand-in")
        set_device = staticmethod(lambda device: Torch.chosen.append(device))

    chosen = []

    def device(self, kind, *index):
        return DEVICE if kind == "cuda" else torch.device(kind, *index)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def device(monkeypatch):
    optimizers = importlib.import_module(torch.optim.Optimizer.__module__)
    monkeypatch.setattr(
        optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type]
    )
    for script in child.SCRIPTS:
        monkeypatch.setattr(importlib.import_module(script), "torch", Torch())
    with Device() as device:
        yield device


def states(run_dir):
    return torch.load(run_dir / "model.pt", weights_only=True)["policy"]


@pytest.mark.parametrize("script", some)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_whole_run_is_the_cpus(script, env_id, device, capsys):
    """The same seed: the same episodes, and to float32 the same weights."""
    module, flags = (
        importlib.import_module(script),
        {"norm_obs": True, "target_kl": 0.05, "ent_coef": 0.01},
    )
    flags |= {
        "env_id": env_id,
        "max_episode_steps": 30,
        "total_timesteps": 2200,
        "eval_episodes": 2,
    }
    flags |= {"eval_interval": 1000, "update_epochs": 2, "num_minibatches": 3}
    if script != "ppo":
        flags |= {"kl_coef": 0.1, "ref_update_interval": 2, "loss_agg": "trajectory"}
    else:
        flags |= {"num_envs": 8, "num_steps": 32}
    if script == "grpo_rtg":
        flags |= {"baseline": "neighbors"}
    Torch.chosen.clear()
    there = module.train(module.Args(cuda=True, **flags))
    assert Torch.chosen == [DEVICE]
    assert "Device: a stand-in" in capsys.readouterr().out and device.crossed["from"] > 100
    before = device.crossed.copy()
    here = module.train(module.Args(**flags))
    assert device.crossed == before and there["steps"] == here["steps"] > 0
    np.testing.assert_allclose(there["train_return"], here["train_return"], rtol=1e-6)
    np.testing.assert_allclose(there["eval_returns"], here["eval_returns"], rtol=1e-4)
    given, expected = states(there["run_dir"]), states(here["run_dir"])
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:.*meta parameter")  # as which the stand-in's pass
@pytest.mark.parametrize("script", some)
def test_a_run_is_resumed_there(script, device):
    """The second half of a run, from the checkpoint of the first, ends with the weights of a run in
    one piece.
    """
    module = importlib.import_module(script)
    flags = {
        "cuda": True,
        "max_episode_steps": 30,
        "eval_episodes": 1,
        "anneal_lr": False,
        "norm_obs": True,
    }
    flags |= {"update_epochs": 2, "num_minibatches": 3}
    flags |= {"num_envs": 8, "num_steps": 32} if script == "ppo" else {}
    whole = module.train(module.Args(total_timesteps=2200, **flags))
    half = module.train(module.Args(total_timesteps=1100, **flags))
    assert 0 < half["steps"] < whole["steps"]
    resumed = module.train(
        module.Args(total_timesteps=2200, resume=str(half["run_dir"] / "checkpoint.pt"), **flags)
    )
    assert resumed["steps"] == whole["steps"]
    for name, value in states(whole["run_dir"]).items():
        assert torch.equal(states(resumed["run_dir"])[name], value), name


@pytest.mark.parametrize("network", [grpo_rtg.Policy, ppo.ActorCritic])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_time_step_crosses_once_each_way(network, env_id, device):
    """For all environments together, and nothing else crosses in a rollout but log_std, once."""
    envs = [grpo_rtg.make_env(env_id, max_episode_steps=10) for _ in range(4)]
    policy = network(envs[0].observation_space, envs[0].action_space, norm_obs=True).to(DEVICE)
    device.crossed.clear()
    episodes = grpo_rtg.play_episodes(envs, policy, [1, 1, 2, 2], np.random.default_rng(0))
    num_steps = episodes.mask.shape[-1]
    assert num_steps > 5 and device.crossed == {
        "to": num_steps,
        "from": num_steps + (not policy.discrete),
    }


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])
@pytest.mark.parametrize("target_kl", [0.0, 1e9])
def test_no_minibatch_waits(script, num_processes, target_kl, device, monkeypatch):
    """A pass sends its order, an update fetches its metrics, --target-kl a number a pass; a
    gradient step, nothing.
    """
    module = importlib.import_module(script)
    if num_processes > 1:
        monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: num_processes)
        monkeypatch.setattr(module.dist, "all_gather_object", lambda values, value: None)
        monkeypatch.setattr(module.dist, "all_reduce", lambda x: x.mul_(num_processes))
    env = grpo_rtg.make_env("CartPole-v1")
    policy = module.ActorCritic if script == "ppo" else module.Policy
    policy = policy(env.observation_space, env.action_space, norm_obs=True).to(DEVICE)
    optimizer = module.Adam(policy.parameters(), 1e-3, eps=1e-5, fused=True)
    names = ["advantages", "weights", "log_probs", "ref_log_probs", "returns"]
    batch = {"obs": torch.randn(64, 4), "actions": torch.randint(2, (64,))} | {
        name: torch.randn(64) for name in names
    }
    batch = {name: x.to(DEVICE) for name, x in batch.items()}
    args = module.Args(update_epochs=3, num_minibatches=16, target_kl=target_kl, ent_coef=0.01)
    args.kl_coef = 0.1  # which ppo.py does not look at
    device.crossed.clear()
    module.update(policy, optimizer, batch, args, np.random.default_rng(0))
    assert device.crossed == {"to": 3, "from": 1 + (3 if target_kl else 0)}


def test_the_stand_in(device):
    """It can fail: a tensor of the CPU among the device's, and all that waits."""
    there, here = torch.arange(3.0).to(DEVICE), torch.ones(3)
    for mix in (
        lambda: there + here,
        lambda: torch.stack([there, here]),
        lambda: there[torch.arange(2)],
    ):
        with pytest.raises(RuntimeError, match="of the CPU among the device's"):
            mix()
    waits = (
        lambda: there.sum().item(),
        lambda: there[there > 1],
        there.nonzero,
        there.cpu,
        there.tolist,
        there.unique,
    )
    for wait in (*waits, lambda: bool(there[0] == 0), lambda: here.copy_(there)):
        device.crossed.clear()
        wait()
        assert device.crossed == {"from": 1}
    device.crossed.clear()
    assert (
        here.to(DEVICE).add(there).device == DEVICE
        and there[there.long()].cos().neg_().exp().sum().shape == ()
    )
    there.copy_(here)
    assert device.crossed == {"to": 2}
