"""The cases on a machine that has GPUs and no package registry."""
