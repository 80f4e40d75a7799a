"""The check of a release: build it, install it anew on each Python, use it outside the repository."""
