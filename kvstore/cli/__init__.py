"""The command line: one command a file, registered by entry point in the group `kvstore.commands`."""
