"""Sources of rows: data files, folders, the hub, and mixtures of them. A reader loads when a source is opened.

descriptions  dataset.py (`Dataset`), mixture.py (`Mixture`)
readers       jsonl.py, arrow.py: rows by number
rows          schema.py and values.py: columns to fields; draws.py: admission numbers to rows
"""

from stages.sources.dataset import Dataset
from stages.sources.mixture import Mixture

__all__ = ["Dataset", "Mixture"]
