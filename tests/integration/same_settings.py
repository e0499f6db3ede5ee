"""The quickstart's settings as input of the handwritten loop. The loop itself imports nothing of the project."""

from graphs.quickstart import TINY_QWEN3
from stages import Generated, Supervised
from stages.backends import STREAM_ROLLOUT
from tests.integration.handwritten import Settings


def reverse_settings(
    *,
    steps: int,
    prompts: int,
    samples: int,
    minibatches: int,
    lr: float,
    warm_steps: int,
    seed: int,
    kl: float = 0.0,
) -> Settings:
    """Return settings that make the loop equal `quickstart.graph` with these parameters on the task `reverse`; with
    `kl`, also with the frozen model's logprobs and a loss of this KL weight."""
    task = Generated("reverse", digits=4)
    return Settings(
        config=TINY_QWEN3,
        alphabet=task.alphabet,
        example=lambda index: task.train(index, order=seed),
        stream=STREAM_ROLLOUT,
        max_tokens=task.max_answer + 1,
        warm_steps=warm_steps,
        warm_batch=Supervised(task).batch,
        warm_lr=Supervised(task).lr,
        steps=steps,
        prompts=prompts,
        samples=samples,
        lr=lr,
        minibatches=minibatches,
        seed=seed,
        kl=kl,
    )
