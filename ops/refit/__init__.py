"""Moves weights from the trainer's layout to the sampler's: plans which bytes go where, and transfers them."""
