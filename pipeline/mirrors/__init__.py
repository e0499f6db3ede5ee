"""Keeps a copy of a run in storage that fsspec reaches, and fetches it from there: `remote.py` is the storage,
`mirror.py` what a run has there, `beside.py` the process that copies a live run.

A mirror runs in a separate process and reads what the run has written; if it fails, training continues.
"""
