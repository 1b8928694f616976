"""The simulator: request traces, replayed on policies alone or through the real store on a virtual clock."""
