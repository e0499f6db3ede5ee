"""Where rows come from: data files, folders, the hub, and mixtures of them. Loads no reader before one is opened.

descriptions  dataset.py (`Dataset`), mixture.py (`Mixture`)
readers       jsonl.py, arrow.py: rows by number
rows          layout.py and values.py: columns to fields; rows.py: admission numbers to rows
"""

from stages.sources.dataset import Dataset
from stages.sources.mixture import Mixture

__all__ = ["Dataset", "Mixture"]
