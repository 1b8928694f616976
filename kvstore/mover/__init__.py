"""The mover, the process that moves blocks between DRAM and one disk: its main, its queue, the daemon's end of it."""
