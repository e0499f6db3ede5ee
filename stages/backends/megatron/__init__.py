"""The megatron backend: Megatron-core, to score and to train on many ranks."""
