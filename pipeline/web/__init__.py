"""The web view: pages drawn from run directories. Its own process; a run knows nothing of it."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"  # what browsers get
