"""The process that serves a bundled engine over a socket."""
