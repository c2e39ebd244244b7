"""Runs of stock RDMA programs, which are not part of this project, on the software twins and on Soft-RoCE devices."""
