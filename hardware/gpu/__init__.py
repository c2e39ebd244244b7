"""Program that runs the cases on a machine that has GPUs but cannot reach a package registry."""
