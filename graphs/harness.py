"""GRPO with an agent of your own: any program that talks to the OpenAI or Anthropic API. Two CPU cores, some minutes.

python -m pipeline.run graphs/harness.py
python -m pipeline.run graphs/harness.py --command "python /home/me/agent.py" --model Qwen/Qwen3-0.6B --data train.jsonl

The agent that comes with it asks a tiny model to reverse digits, and then to reverse them back. Its reward is the
fraction of right digits.
"""

import shlex
import sys
from typing import Literal

from graphs.quickstart import TINY_QWEN3
from ops.rewards import turn_sum
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import (
    Advantage,
    ClippedLoss,
    Dynamic,
    Endpoint,
    Filter,
    Generated,
    Prompts,
    Refit,
    Reward,
    Supervised,
    Train,
    TruncatedIS,
)

AGENT = """
import http.client, json, os, sys

row = json.load(sys.stdin)
url = os.environ["OPENAI_BASE_URL"].removeprefix("http://")
place, _, path = url.partition("/")
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages, right = [], 0
for answer in (row["answer"], row["answer"][::-1]):
    messages.append({"role": "user", "content": "r" + answer[::-1] + ">"})
    connection = http.client.HTTPConnection(place)
    connection.request("POST", f"/{path}/chat/completions", json.dumps({"messages": messages}), key)
    message = json.load(connection.getresponse())["choices"][0]["message"]
    messages.append(message)
    right += sum(map(str.__eq__, message["content"], answer))
print(json.dumps({"reward": right / (2 * len(answer))}))
"""
# One message after the other; those of the model are closed.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def graph(
    command: str = "",
    model: str = "",
    data: str = "",
    generator: Literal["torch", "vllm"] = "torch",
    trainer: Literal["torch", "megatron"] = "torch",
    sampler_gpus: int = 0,
    learner_gpus: int = 0,
    steps: int = 40,
    max_staleness: int = 0,
    seed: int = 0,
    prompts_per_step: int = 8,
    samples_per_prompt: int = 8,
    commands: int = 64,
    turns: int = 2,
    tokens: int = 16,
    turn_tokens: int = 4,
    microbatch: int = 8192,
    lr: float = 2e-3,
) -> Graph:
    """Trains a model on what an agent does with it.

    command             the agent and its arguments; empty is the one in this file
    model               a folder, or a hub name; empty is a tiny one
    data                a JSONL file with the columns prompt and answer; empty are numbers to reverse
    generator           backend that samples
    trainer             backend that trains
    sampler_gpus        GPUs that sample, one worker each; 0 is the CPU, and then learner_gpus is 0 too
    learner_gpus        GPUs that train, one worker each
    steps               batches to train on
    max_staleness       maximum age of a sample, in policy versions; 0 is synchronous
    seed                seed of the model's weights and of all random numbers
    prompts_per_step    groups per batch
    samples_per_prompt  episodes per prompt, each with a process of the agent
    commands            the most processes at a time
    turns               the most requests of an episode
    tokens              the most tokens after the first request, those of later requests included
    turn_tokens         the most tokens of an answer
    microbatch          tokens in one pass of the trainer, padding included
    lr                  learning rate; 1e-6 suits a model that is not tiny
    """
    task = Generated("reverse", digits=3, held_out=100)
    tiny = Model(
        "tiny-qwen3",
        config=TINY_QWEN3,
        alphabet="bytes" if data else task.alphabet,
        chat_template=TEMPLATE,
        warm_start=None if data else Supervised(task, steps=600, until=0.25),
        seed=seed,
    )
    policy = Model(model) if model else tiny
    sampler = WorkerGroup("sampler", backend=generator, gpus=sampler_gpus)
    learner = WorkerGroup("learner", backend=trainer, gpus=learner_gpus)
    return Graph(
        name="harness",
        host=sampler,
        source=Prompts(data or task, batch=prompts_per_step),
        stages=(
            Endpoint(
                policy,
                command=shlex.split(command) if command else (sys.executable, "-c", AGENT),
                on=sampler,
                given=("prompt", "answer"),
                samples_per_prompt=samples_per_prompt,
                commands=commands,
                turns=turns,
                tokens=tokens,
                turn_tokens=turn_tokens,
            ),
            Filter("complete"),
            Reward(turn_sum),
            Advantage("group_relative"),
            Train(
                policy,
                on=learner,
                loss=ClippedLoss(correction=TruncatedIS(cap=2.0) if max_staleness else None),
                lr=lr,
                betas=(0.9, 0.95),
                schedule="cosine",
                minibatches=2,
                microbatch=Dynamic(microbatch),
                prev="own",
            ),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=steps, max_staleness=max_staleness, seed=seed),
    )
