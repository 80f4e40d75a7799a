"""The passes from an unmodified ``nn.Module`` to F, B and W graphs. One file, one pass."""
