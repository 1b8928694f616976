"""What keeps a wrong block from being served: invariants, samples that are looked at again, blocks taken back. Pure."""
