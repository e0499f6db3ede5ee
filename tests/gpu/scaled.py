"""Samples of an engine with an 8-bit cache, from a process of its own: after a refit to weights whose keys and values
are far above 448, asleep and awake again, and with scales of 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LARGE = 2.0**11  # exact in bfloat16: the distributions stay what they are


def rescaled(rank: int, folder: str, tokens: int) -> dict[str, Any]:
    """Return the mean difference of the logprobs of 64 samples from those of transformers in bfloat16, by the state of
    the engine, the record of the refit, and what the first attention layer reads."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.shapes import model_of
    from ops.refit.share import digest_of
    from ops.refit.transports import TRANSPORTS
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import engine
    from stages.backends.model.places import placed
    from stages.backends.refit.source import Source
    from stages.backends.vllm import api
    from tests.gpu.refitted import samples_of, scores_of

    source = model_of("0.6B", Path(folder))
    model, network = Model(source), AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).cuda()
    group = WorkerGroup("sampler", backend="vllm", gpus=1, threads=1, memory=0.5, cache="fp8")
    backend = engine(StageContext(group=group, rank=0, seed=0, group_size=8, run_dir=Path(folder), shared={}))
    client, far = backend.client(model), {}

    def look(name: str) -> None:
        made, ids = samples_of(backend, model, tokens)
        far[name] = float((made.logprobs.values - scores_of(network, ids, made)).abs().mean())

    async def ones() -> None:
        llm = await client._alive()
        await api.forget(llm)
        await api.scale_cache(llm, {number: (1.0, 1.0, 1.0) for number in client._scales})

    look("folder")
    start = dict(client._scales)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "v_proj" in name or "k_norm" in name:
                parameter.mul_(LARGE)
            elif "o_proj" in name or "q_norm" in name:
                parameter.div_(LARGE)
    tensors, places, held = placed(network, torch.bfloat16)
    share = Source(torch.device("cuda", 0), 0, tensors, places, held).share(held, TRANSPORTS["pull"])
    served = backend.serve(model, [share], 1)
    look("refit")
    backend.sleep()
    backend.wake()
    look("awake")
    after = dict(client._scales)
    client.call(ones())
    look("ones")
    backend.close()
    as_offered = served.sha256 == digest_of([share])
    return {"far": far, "record": dict(served.record), "as offered": as_offered, "start": start, "after": after}
