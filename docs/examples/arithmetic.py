"""GRPO as a language model has it, in minutes: a policy emits the tokens of a sum's answer, and a
verifier pays.

    python docs/examples/arithmetic.py
    python docs/examples/arithmetic.py --seeds 5

A policy is first pretrained on written-out sums, briefly, so that it is often wrong. Then each GRPO
script trains it further: every iteration samples G answers to each of K prompts, and the KL penalty
holds the policy to the pretrained one. What is printed is the share of right answers, on prompts
that no training has seen and on those of training.

    here                                  paper                  TRL
    the sum that reset(seed=s) draws      question q             prompt
    the tokens of an episode              output o_i             completion
    --num-groups K, --group-size G        batch of questions, G  generation batch size,
                                                                 num_generations
    reward of the last token, 1 if right  outcome supervision    a verifiable reward
    reward of each token, 1 if right      process supervision    (none)
    the pretrained policy, --kl-coef      π_ref, β               reference model, beta
"""

import contextlib
import copy
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gymnasium as gym
import numpy as np
import torch
import tyro

import grpo_outcome
import grpo_process
import grpo_rtg

STEPS = 100_000  # of each script: tokens; with few the likeliest answers become worse
END = 10  # the vocabulary: ten digits and the end of the answer
MAX_TOKENS = 3  # two digits and END
NUMBERS = 20  # a sum adds two of 0, …, 19
PAIRS = [(a, b) for a in range(NUMBERS) for b in range(a + 1)]  # a ≥ b
PAIRS = np.random.default_rng(0).permutation(PAIRS)
# A sum and the same with its numbers exchanged are in one split; of 210 pairs 52 are held out.
SPLITS = {
    name: np.array([p for a, b in pairs for p in ([(a, b), (b, a)] if a > b else [(a, a)])])
    for name, pairs in (("held-out", PAIRS[:52]), ("train", PAIRS[52:]))
}


def answer(a: int, b: int) -> list[int]:
    """The tokens of a + b: 7 + 5 is 1, 2, END."""
    return [*map(int, str(a + b)), END]


class Arithmetic(gym.Env):
    """An episode is the answer to one sum, an action the next token; what is observed is the sum
    and the tokens so far.

    With supervision "outcome" the last token pays 1 if the whole answer is right; with "process"
    every token that is the right answer's in its place pays 1. An answer ends with END, or after
    MAX_TOKENS tokens.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self, supervision: str = "outcome", split: str = "train", render_mode: str | None = None
    ):
        self.supervision, self.prompts, self.render_mode = supervision, SPLITS[split], render_mode
        self.observation_space = gym.spaces.Box(-1, 1, (2 + MAX_TOKENS * 11,), np.float32)
        self.action_space = gym.spaces.Discrete(11)

    def reset(
        self, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.prompt, self.tokens = self.prompts[self.np_random.integers(len(self.prompts))], []
        return observe(self.prompt, self.tokens), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.tokens.append(int(action))
        done, right = action == END or len(self.tokens) == MAX_TOKENS, answer(*self.prompt)
        if self.supervision == "outcome":
            reward = float(done and self.tokens == right)
        else:
            reward = float(self.tokens[-1:] == right[len(self.tokens) - 1 : len(self.tokens)])
        return observe(self.prompt, self.tokens), reward, bool(done), False, {}

    def render(self) -> str | None:
        """The sum and the answer so far, with mode "ansi"."""
        a, b = self.prompt
        return (
            f"{a} + {b} = {''.join('.' if x == END else str(x) for x in self.tokens)}\n"
            if self.render_mode
            else None
        )


def observe(prompt, tokens: list[int]) -> np.ndarray:
    """What the policy sees [35]: the two numbers, scaled to [-1, 1], and a one-hot vector for each
    token so far.
    """
    obs = np.zeros(2 + MAX_TOKENS * 11, np.float32)
    obs[:2] = 2 * np.array(prompt) / NUMBERS - 1
    for i, token in enumerate(tokens):
        obs[2 + 11 * i + token] = 1
    return obs


if __name__ != "__main__":  # gym.make imports this module under its full name, and registers there
    for name, supervision in (("Arithmetic", "outcome"), ("ArithmeticProcess", "process")):
        gym.register(
            f"{name}-v0",
            Arithmetic,
            kwargs={"supervision": supervision},
            max_episode_steps=MAX_TOKENS,
        )


def pretrain(policy: torch.nn.Module, steps: int) -> None:
    """Supervised: raise the likelihood of the answers to the prompts of the training split, token
    by token.
    """
    tokens = [
        (observe(p, answer(*p)[:i]), token)
        for p in SPLITS["train"]
        for i, token in enumerate(answer(*p))
    ]
    obs, targets = (
        torch.from_numpy(np.array([x for x, _ in tokens])),
        torch.tensor([[y] for _, y in tokens]),
    )
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(steps):
        loss = -policy(obs).log_prob(targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(policy: torch.nn.Module, split: str, greedy: bool) -> float:
    """The share of right answers: of the likeliest tokens, or of 20 samples for each prompt."""
    torch.manual_seed(0)
    prompts = np.repeat(SPLITS[split], 1 if greedy else 20, axis=0)
    answers = [[] for _ in prompts]
    for _ in range(MAX_TOKENS):
        obs = np.array([observe(p, tokens) for p, tokens in zip(prompts, answers)])
        for tokens_so_far, [token] in zip(answers, policy.act(obs, greedy)):
            if END not in tokens_so_far:
                tokens_so_far.append(int(token))
    return float(np.mean([tokens == answer(*p) for p, tokens in zip(prompts, answers)]))


def finetune(script, pretrained: torch.nn.Module, args) -> torch.nn.Module:
    """Train from the pretrained policy, which is π_ref, too."""
    quiet = contextlib.redirect_stdout(None)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), quiet:
        run = script.train(args, policy_type=lambda *_: copy.deepcopy(pretrained))
    return run.saved["policy"]


def measure(seed: int) -> dict[str, list[float]]:
    """Share of right answers of each policy: sampled and greedy on held-out prompts, the same on
    those of training.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    args = grpo_outcome.Args(
        env_id="docs.examples.arithmetic:Arithmetic-v0",
        total_timesteps=STEPS,
        num_groups=16,
        group_size=8,
        gamma=1.0,
        update_epochs=2,
        minibatch_size=96,
        learning_rate=1e-2,
        target_kl=0.0,
        ent_coef=0.0,
        kl_coef=0.04,
        ref_update_interval=0,
        loss_agg="trajectory",
        eval_episodes=1,
        seed=seed,
    )
    env = grpo_outcome.make_env(args)
    policy = grpo_outcome.Policy(env.observation_space, env.action_space, args)
    pretrain(policy, steps=300)
    policies = {"pretrained": policy}
    for script, name in (
        (grpo_outcome, "Arithmetic-v0"),
        (grpo_process, "ArithmeticProcess-v0"),
        (grpo_rtg, "ArithmeticProcess-v0"),
    ):
        print(f"{script.__name__} on {name}, seed {seed}")
        options = asdict(args) | {"env_id": f"docs.examples.arithmetic:{name}"}
        policies[f"{script.__name__}, {name}"] = finetune(script, policy, script.Args(**options))
    return {
        name: [accuracy(policy, split, greedy) for split in SPLITS for greedy in (False, True)]
        for name, policy in policies.items()
    }


def main(seeds: int = 1) -> None:
    """Train with the seeds 1 to SEEDS and print the shares of right answers: median over seeds and,
    in brackets, range.

    Args:
        seeds: how many; each takes minutes
    """
    if seeds < 1:
        print("arithmetic.py: --seeds must be 1 or more.", file=sys.stderr)
        sys.exit(2)
    start = time.perf_counter()
    results = [measure(seed) for seed in range(1, seeds + 1)]
    width = 7 if seeds == 1 else 15
    heads = ("held out: sampled", "greedy", "train: sampled", "greedy")
    print(
        f"\n{'share of right answers':35}"
        + "".join(f"{head:>{max(width, len(head)) + 2}}" for head in heads)
    )
    for name in results[0]:
        line = f"{name:35}"
        for head, shares in zip(heads, zip(*(result[name] for result in results))):
            spread = "" if seeds == 1 else f" [{min(shares):.0%}, {max(shares):.0%}]"
            line += f"{f'{np.median(shares):.0%}{spread}':>{max(width, len(head)) + 2}}"
        print(line)
    print(f"{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    tyro.cli(main)
