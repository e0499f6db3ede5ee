"""Models on disk and in memory, apart from any engine: folders, tokenizers, weights by name."""
