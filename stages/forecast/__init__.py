"""What stages need of a GPU, from the shape of their model: operations, bytes, memory. Loads no tensor library.

`Rollout`, `PrevLogprobs`, `RefLogprobs`, `Train` and `Refit` answer `pipeline.declare.work.Foretells` with it. The
backends `megatron` and `vllm` are known; of others nothing is, and they answer None.
"""
