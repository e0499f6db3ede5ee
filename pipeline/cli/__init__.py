"""What the commands share: loading a graph file, flags, the console."""
