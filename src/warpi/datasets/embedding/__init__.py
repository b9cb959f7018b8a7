"""Vectors of images and texts by a pretrained model: computed once, stored in a folder, read as a data set."""
