"""The web view: pages drawn from run directories. Runs in its own process; a run does not know about it."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"  # files for the browser
