"""Blocks on their way between the tiers: write-behind, promotion, prefetch, and what the disks are given. Pure."""
