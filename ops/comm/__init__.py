"""Groups of processes that exchange tensors."""
