"""The backends' ends of a refit: what a sampler receives, and both sides of a meeting."""
