"""GRPO with rollout one batch ahead of training: `graphs/grpo.py` with one number changed.

python -m pipeline.run graphs/grpo_async.py --model Qwen/Qwen3-0.6B --data train.jsonl
"""

from functools import partial

from graphs import grpo

graph = partial(grpo.graph, max_staleness=1)
