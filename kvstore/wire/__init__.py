"""What crosses a process boundary: packed structs, and the code generated from proto/ (in `kvstore.wire.v1`)."""
