"""Weights from the layout that trains into the layout that serves: which bytes go where, and who moves them."""
