"""Drives one run: passes the scheduler's decisions to an executor and its reports back, and records both."""
