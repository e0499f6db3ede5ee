"""Checks a graph and makes its plan, or reports every problem."""
