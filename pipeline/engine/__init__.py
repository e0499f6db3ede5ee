"""Drives one run: the scheduler's decisions to an executor, its reports back, all of it recorded."""
