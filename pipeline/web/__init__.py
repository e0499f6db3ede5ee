"""The web view: pages drawn from run directories. Runs in its own process; it does not affect the run."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"  # files for the browser
