"""Helpers without knowledge of methods or data: seeds, files, flags, devices and distributed training."""
