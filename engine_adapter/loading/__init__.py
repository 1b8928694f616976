"""What a request loads and what it computes, and how loads come: planned, ahead of use, from both ends, in groups."""
