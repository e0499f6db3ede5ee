"""Code that the commands share: graph file loading, flags, console output."""
