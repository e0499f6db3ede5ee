"""Time and memory of a graph before it runs: what stages say of their work, and what a GPU was measured to do."""
