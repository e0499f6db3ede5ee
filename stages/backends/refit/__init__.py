"""The refit ends that backends share: the source for trainers, the target for samplers."""
