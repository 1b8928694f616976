"""The commands that run the bundled engine; they join the command line by entry point."""
