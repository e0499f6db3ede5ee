"""GRPO on GSM8K, grade school mathematics, with held-out evaluation. Without --model, a tiny random model on two cores.

python -m pipeline.run graphs/gsm8k.py --model Qwen/Qwen3-0.6B --data gsm8k --sampler-gpus 1 --learner-gpus 1

With --tool it is a chat, in which the model may call a calculator. That needs a model with a chat template.

The folder contains train.jsonl and test.jsonl of https://github.com/openai/grade-school-math (Cobbe et al. 2021, arXiv
2110.14168), with the columns `question` and `answer`; the final number follows `####` in the answer.
"""

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphs import grpo
from ops.rewards import MathVerify, boxed
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    Call,
    ClippedLoss,
    Dynamic,
    End,
    Environment,
    Episode,
    Evaluate,
    Filter,
    Messages,
    Packed,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Reply,
    Reward,
    Rollout,
    Tool,
    Train,
)

TEMPLATE = "{question}\nThink step by step, then write the answer in \\boxed{{}}.\n"
LONGEST = 200  # characters of an expression
SIGNS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def calculated(expression: str) -> float:
    """The value of an expression of numbers, + - * / and brackets. Raises ValueError, SyntaxError or ArithmeticError
    for anything else."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
                return SIGNS[type(sign)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=of):
                return -value(of)
        raise ValueError("it consists of numbers, + - * / and brackets")

    if len(expression) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    if not math.isfinite(made := value(ast.parse(expression.replace(",", "").strip(), mode="eval").body)):
        raise ValueError("its value is too large")
    return made


@dataclass(frozen=True)
class ArithmeticTool(Environment):
    """A question, and a calculator for the model that answers it. What cannot be calculated is said, and costs
    nothing but the turn."""

    tools = (Tool("calculate", {"expression": str}, "The value of an expression of numbers, + - * / and brackets."),)

    def open(self, row, draw):
        """The question."""
        return None, [{"role": "user", "content": row["prompt"]}]

    def turn(self, state, reply: Reply) -> Messages | End:
        """A value for each call. Without calls the reply is the answer."""
        said = [{"role": "tool", "content": self._answer(call)} for call in reply.calls]
        return Messages(said) if said else End("answered")

    def _answer(self, call: Call) -> str:
        if call.name != "calculate" or not isinstance(expression := (call.arguments or {}).get("expression"), str):
            return "error: only calculate can be called, with an expression"
        try:
            return f"{calculated(expression):.10g}"
        except SyntaxError as error:
            return f"error: {error.msg}"
        except (ValueError, ArithmeticError) as error:
            return f"error: {error}"


def graph(
    model: str = "",
    data: str = "gsm8k",
    generator: Literal["torch", "vllm"] = "torch",
    trainer: Literal["torch", "megatron"] = "torch",
    sampler_gpus: int = 0,
    learner_gpus: int = 0,
    colocated: bool = False,
    sampler_memory: float = 0.85,
    steps: int = 100,
    seed: int = 0,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_tokens: int = 512,
    tool: bool = False,
    turns: int = 6,
    microbatch: int = 8192,
    minibatches: int = 4,
    recompute: Literal["none", "mlp", "layers"] = "none",
    lr: float = 1e-6,
    kl: float = 0.001,
    evaluate_every: int = 20,
    evaluate_prompts: int = 200,
    reward_workers: int = 0,
) -> Graph:
    """Group-relative policy optimization on word problems, with math-verify as the reward.

    model               a folder, or a hub name; empty builds a tiny random model to check that everything runs
    data                a folder with train.jsonl and test.jsonl
    generator           backend that samples
    trainer             backend that trains
    sampler_gpus        GPUs that sample, one worker each; 0 is the CPU, and then learner_gpus is 0 too
    learner_gpus        GPUs that train, one worker each
    colocated           whether sampler and learner take turns on the same GPUs
    sampler_memory      share of each GPU that vllm takes, at most; in turns, the trainer keeps the rest
    steps               batches to train on
    seed                seed of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  responses per prompt
    max_tokens          maximum tokens per response, with what the calculator answers
    tool                whether the model may call a calculator, in a chat
    turns               with tool: the most turns of an answer
    microbatch          tokens in one pass of the trainer, padding included; the longest prompt and max_tokens must fit
    minibatches         optimizer updates per batch
    recompute           what the trainer computes again in the backward pass, to need less memory: nothing, feed-forward
                        parts (megatron), or whole layers
    lr                  learning rate
    kl                  weight of the KL divergence from the model before training; above 0
    evaluate_every      steps between evaluations on problems of test.jsonl
    evaluate_prompts    problems per evaluation; test.jsonl has 1,319
    reward_workers      actors that only compute rewards; 0 shares the actor of the other stages without a model
    """
    policy = Model(model) if model else Model("tiny-qwen3", config=TINY_QWEN3, alphabet="bytes", seed=seed)
    sampler = WorkerGroup("sampler", backend=generator, gpus=sampler_gpus, memory=sampler_memory)
    learner = WorkerGroup("learner", backend=trainer, gpus=learner_gpus, colocated=sampler if colocated else None)
    judges = WorkerGroup("judges", workers=reward_workers) if reward_workers else None
    # A response that cannot be judged, or not in time, is wrong; reward/math_verify_timeouts and _errors count these.
    verify = MathVerify(timeout_s=5.0, on_timeout=0.0, on_error=0.0, answer_after="####")
    passes = Packed(microbatch) if trainer == "megatron" else Dynamic(microbatch)  # little or no padding
    # Samples to score while others are still being sampled; 0 is all, in one turn of the GPUs or of the frozen weights.
    run = 0 if colocated else samples_per_prompt * max(4, learner_gpus)
    # In turns nothing is scored in advance: the first update's own pass has its old logprobs.
    prev = () if colocated else (PrevLogprobs(policy, on=learner, microbatch=passes, at_once=run),)
    episode = Episode(
        policy,
        ArithmeticTool(),
        on=sampler,
        samples_per_prompt=samples_per_prompt,
        turns=turns,
        tokens=max_tokens,
        turn_tokens=max_tokens,
        chat=True,
    )
    rollout = Rollout(policy, on=sampler, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens)
    return Graph(
        name="gsm8k",
        source=Prompts(Path(data) / "train.jsonl", batch=prompts_per_step, template=TEMPLATE),
        stages=(
            *((episode, Filter("complete")) if tool else (rollout,)),
            Reward(verify, boxed, weights=(1.0, 0.1), on=judges),
            *prev,
            RefLogprobs(policy.frozen(), on=learner, microbatch=passes, at_once=run if trainer == "torch" else 0),
            Advantage("group_relative"),
            Train(
                policy,
                on=learner,
                loss=ClippedLoss(kl=kl),
                lr=lr,
                minibatches=minibatches,
                checkpoint_activations=grpo.RECOMPUTED[recompute],
                microbatch=passes,
                prev="own" if colocated else "field",
            ),
            Refit(policy, source=learner, target=sampler),
            Evaluate(
                policy,
                Path(data) / "test.jsonl",
                on=sampler,
                reward=verify,
                every=evaluate_every,
                prompts=evaluate_prompts,
                max_tokens=max_tokens,
                decode_batch=prompts_per_step * samples_per_prompt,
                template=TEMPLATE,
                episode=episode if tool else None,
            ),
        ),
        schedule=Schedule(steps=steps, seed=seed),
    )


choices = grpo.choices  # what to try for flags that are not given, if `--on` names GPUs
