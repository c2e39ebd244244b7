"""Program that runs the cases on a machine that has GPUs and no package registry."""
