"""Moves weights from the trainer's layout to the sampler's: which bytes go where, and how they travel."""
