"""Runs: settings, defaults, the run folder, training, resuming, reopening and predicting."""
