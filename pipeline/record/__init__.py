"""What a run leaves on disk: its trace, its checkpoints, and how they are read again."""
