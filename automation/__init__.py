"""Preparation of machines, environments and builds for the sessions of noxfile.py."""
