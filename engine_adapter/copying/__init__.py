"""Copies between HBM and DRAM: the contract, the twin's copier, CUDA's with its parts."""
