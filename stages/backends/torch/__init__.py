"""The reference backend: any Hugging Face causal language model, on the CPU or one GPU per worker."""
