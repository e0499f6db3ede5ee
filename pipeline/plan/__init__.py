"""A graph, checked and made into a plan, or every problem that it has."""
