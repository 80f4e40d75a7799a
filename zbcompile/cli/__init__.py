"""The command line: `main` knows the commands, and each command has a file with its options and its run."""
