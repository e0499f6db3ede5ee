"""Builds the documentation site: the pages of docs/, and those that are written from the code and its results."""
