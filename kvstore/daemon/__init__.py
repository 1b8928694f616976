"""The daemon: one owner loop around the pure store, with sockets, movers, liveness and recovery as its thin shell."""
