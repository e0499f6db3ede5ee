"""What a run writes to disk: its trace and its checkpoints, and readers for them."""
